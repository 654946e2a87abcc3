"""Model files with numbers that cost memory, time or log (CWE-770, CWE-789): a few bytes of JSON, no weights."""

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.sizing import peak_bytes

SHORT = 4000  # characters
SMALL = 200 << 20  # bytes: the bundled model's own files, and a few copies of a text of a few megabytes


@pytest.fixture
def spoilt(tmp_path: Path) -> Callable[..., Path]:
    """The bundled model with other values in its config.json."""

    def make(**values: Any) -> Path:
        for file in BUNDLED.iterdir():
            (tmp_path / file.name).symlink_to(file)
        config = json.loads((BUNDLED / "config.json").read_text())
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config | values))
        return tmp_path

    return make


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("claimed", "options"), [(1 << 24, {"max_model_len": 512}), (1 << 21, {})])
def test_a_claimed_context_costs_no_memory_beyond_the_served_one(
    spoilt: Callable[..., Path], caplog: pytest.LogCaptureFixture, claimed: int, options: dict[str, Any]
) -> None:
    """`max_position_embeddings: 16777216` took 4.5 GB with `--max-model-len 512`, for rotary tables of all positions.
    Two million tokens took 5.5 GB: a context is served up to a limit, unless the operator asks for more."""
    directory = str(spoilt(max_position_embeddings=claimed))

    def load() -> None:
        with NanoServingEngine.from_pretrained(directory, **options) as engine:
            engine.generate([[5] * 8], SamplingParams(max_tokens=1), progress=False)

    assert peak_bytes(load, torch.device("cpu")) < 1 << 30, "the kernels may take some, if they are loaded here first"
    if not options:
        assert "of the model's context of 2097152 tokens, 131072 are served; --max-model-len serves more" in caplog.text
    assert EngineOptions(max_model_len=1 << 18).context(claimed) == 1 << 18


BOMBS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 1 << 16, "layer_types": None},
    "hidden size": {"hidden_size": 1 << 24},
    "vocabulary": {"vocab_size": (1 << 31) - 1},
    "inner size": {"intermediate_size": 1 << 24},
    "heads": {"num_attention_heads": 1 << 20, "num_key_value_heads": 1 << 20},
    "types of layers": {"layer_types": ["full_attention"] * 200_000},
    "text for a number": {"hidden_size": "9" * 5_000_000},
    "long name": {"model_type": "x" * 5_000_000},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": ["x"] * 100_000}},
    "end tokens": {"eos_token_id": [[5] * 100_000]},
}


@pytest.mark.parametrize("values", BOMBS.values(), ids=BOMBS)
def test_sizes_that_the_weights_do_not_have_are_a_short_error_before_memory_is_allocated(
    values: dict[str, Any], spoilt: Callable[..., Path]
) -> None:
    directory = spoilt(**values)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            load_weights(Checkpoint(directory), ModelConfig.from_pretrained(directory))
        assert len(str(caught.value)) < SHORT
        assert tracemalloc.get_traced_memory()[1] < SMALL
    finally:
        tracemalloc.stop()


def test_a_file_of_many_tensors_is_a_short_error(spoilt: Callable[..., Path]) -> None:
    directory = spoilt()
    (directory / "model.safetensors").unlink()
    save_file({f"model.layers.{number}.x": torch.zeros(1) for number in range(5000)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"and 50\d\d more$") as caught:
        load_weights(Checkpoint(directory), ModelConfig.from_pretrained(directory))
    assert len(str(caught.value)) < SHORT


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_without_an_end_is_read_up_to_a_limit(name: str, spoilt: Callable[..., Path]) -> None:
    """A repository may hold links, and a link to /dev/zero has no end."""
    directory = spoilt()
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="longer than 16777216 bytes"):
        ModelConfig.from_pretrained(directory)
