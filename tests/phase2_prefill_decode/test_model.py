"""Model.load: directories, devices and dtypes, and the messages that refuse bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode import connect
from phase2_prefill_decode.loading.weights import load_weights
from phase2_prefill_decode.model import Model
from tests.phase2_prefill_decode.models import saved, tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(tiny_model("llama"), tmp_path)


def rewrite(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_by_default_weights_have_the_dtype_of_the_checkpoint(directory: Path) -> None:
    assert Model.load(directory, device="cpu").decoder.dtype == torch.float32
    assert Model.load(BUNDLED, device="cpu").decoder.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float64", "int8", "half"])
def test_a_dtype_that_no_kernel_computes_in_is_refused(directory: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"^dtype must be one of float32, bfloat16, float16, got '{dtype}'"):
        Model.load(directory, device="cpu", dtype=dtype)


def test_a_device_that_is_not_there_is_named(directory: Path) -> None:
    seen = torch.cuda.is_available()
    allowed = "cpu or cuda" if seen else "cpu, for torch sees no GPU"
    for device in ("tpu", "cuda:99" if seen else "cuda"):
        with pytest.raises(ValueError, match=rf"^device must be {allowed}, got '{device}'$"):
            Model.load(directory, device=device)


def test_a_tokenizer_of_another_model_is_refused(directory: Path) -> None:
    shutil.copy(BUNDLED / "tokenizer.json", directory)
    with pytest.raises(
        ValueError, match=rf"^{directory}: the tokenizer has 4096 tokens and the model 307: not of one model"
    ):
        Model.load(directory, device="cpu")


def test_an_error_in_a_config_names_its_file_and_its_fields(directory: Path) -> None:
    rewrite(directory, num_key_value_heads=3)
    words = "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"
    with pytest.raises(ConfigError, match=rf"^{directory}/config\.json: {words}$"):
        Model.load(directory, device="cpu")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"", "is not JSON: Expecting value"),
        ("config.json", b"[" * 200_000, "is not JSON: maximum recursion depth exceeded"),
        ("config.json", b"null", "must hold a JSON object, got NoneType"),
        ("generation_config.json", b'{"eos_token_id": [1, "2"]}', "eos_token_id must be an integer .*, got '2'"),
        ("generation_config.json", b'{"eos_token_id": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        ("tokenizer.json", b"\xff", "holds no tokenizer that can be read: "),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "tokenizer's decoder is missing"),
        ("tokenizer_config.json", b"{", "is not JSON: Expecting"),
        ("tokenizer_config.json", b"\xff", "is not JSON: 'utf-8' codec"),
        ("tokenizer_config.json", b"[]", "must hold a JSON object, got list"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "a chat template must be text, got 5"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": {}}]}', "must be text, got {}"),
        ("chat_template.jinja", b"\xff", "codec can.t decode byte"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    directory = Path(shutil.copytree(BUNDLED, tmp_path / "model"))
    if name == "tokenizer_config.json":
        (directory / "chat_template.jinja").unlink()
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{directory / name}:? .*{words}.*$"):
        Model.load(directory, device="cpu")


@pytest.mark.parametrize("ends", ["2", [[2]], {}, -1, True, 1.5])
def test_a_tokenizer_refuses_eos_ids_that_are_no_tokens(tmp_path: Path, ends: object) -> None:
    directory = Path(shutil.copytree(BUNDLED, tmp_path / "model"))
    rewrite(directory, eos_token_id=ends)
    with pytest.raises(
        ValueError, match=rf"^{directory}/config\.json: eos_token_id must be an integer from 0 to .*, got "
    ):
        Tokenizer.from_pretrained(directory)


def test_what_needs_extras_names_them_where_there_are_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense model in safetensors needs none."""
    monkeypatch.setattr("phase0_request.support.checks.find_spec", lambda name: None)
    config = connect.config_of(directory)
    assert load_weights(connect.source_of(directory, config), config).norm.shape == (config.hidden_size,)
    connect.check_split(config, 1)
    rewrite(directory, quantization_config={"quant_method": "awq"})
    refused: dict[str, Callable[[], object]] = {
        "a GGUF file needs phase0": lambda: Tokenizer.from_pretrained("model.gguf"),
        "a GGUF file needs phase2": lambda: connect.config_of("model.gguf"),
        "a checkpoint with a quantization_config needs phase2": lambda: connect.config_of(directory),
        "quantization needs phase2": lambda: connect.quantization("int8"),
        "tensor_parallel_size=2 needs phase2": lambda: connect.check_split(config, 2),
    }
    for said, ask in refused.items():
        with pytest.raises(ConfigError, match=f"{said}.*extras, which is not here$"):
            ask()
