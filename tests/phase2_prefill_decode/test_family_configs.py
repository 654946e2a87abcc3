"""What a config.json of a family may say: what transformers writes is read, and what is not known is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.connect import config_of
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.families import OTHERS, supported
from phase2_prefill_decode.extras.families.known.classes import NEEDS
from phase2_prefill_decode.extras.families.sources import translated
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.families import FAMILIES
from phase2_prefill_decode.model import Model
from tests.phase2_prefill_decode.models import SIZES, saved, tiny_model
from tests.phase2_prefill_decode.test_identity import follows, logits, prompts

WRAPPED = {kind for kind, family in OTHERS.items() if "text_config" in family.absent}
DENSE = sorted(OTHERS.keys() - WRAPPED)
FOUR = {**SIZES, "num_hidden_layers": 4}  # of some families only one layer in four has attention


def test_the_classes_that_load_are_those_of_transformers() -> None:
    assert {*supported().values()} == {*FAMILIES}
    theirs = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if kind in DENSE}
    assert theirs == {name: kind for name, kind in supported().items() if kind in DENSE}


@pytest.mark.parametrize("kind", DENSE)
def test_all_that_transformers_writes_is_known(kind: str) -> None:
    written = AutoConfig.for_model(kind, **FOUR).to_dict()
    assert ModelConfig.from_dict({**written, "eos_token_id": None}).model_type == kind


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 4096}),  # gpt-oss-20b
        ("qwen3_moe", {"use_qk_norm": True, "shared_expert_intermediate_size": 0}),  # Qwen3-Coder-30B-A3B
        ("qwen3", {"use_qk_norm": True}),
    ],
)
def test_keys_of_published_files_that_transformers_ignores_are_known(kind: str, keys: dict[str, Any]) -> None:
    written = {**AutoConfig.for_model(kind, **FOUR).to_dict(), "eos_token_id": None}
    assert ModelConfig.from_dict(written | keys) == ModelConfig.from_dict(written)


@pytest.mark.parametrize("name", ["use_qk_norm", "qk_layernorm", "attn_output_gate"])
def test_a_switch_of_another_architecture_is_refused_for_a_llama(name: str) -> None:
    written = {**AutoConfig.for_model("llama", **FOUR).to_dict(), "eos_token_id": None}
    with pytest.raises(ConfigError, match=f"{name} is True"):
        ModelConfig.from_dict(written | {name: True})
    ModelConfig.from_dict(written | {name: False})


@pytest.mark.parametrize("kind", sorted({*DENSE} - {"llama", "mistral", "qwen2", "qwen3"}))
def test_a_size_that_is_not_a_positive_integer_is_refused_by_name(kind: str) -> None:
    written = {**AutoConfig.for_model(kind, **FOUR).to_dict(), "eos_token_id": None}
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        for value in ("4", 0, None, [1]):
            with pytest.raises(ValueError, match=f"{name} must be an integer from 1"):
                ModelConfig.from_dict(written | {name: value})


def test_a_number_of_experts_that_no_model_has_is_refused_at_once() -> None:
    written = {**AutoConfig.for_model("qwen3_moe", **FOUR).to_dict(), "eos_token_id": None}
    with pytest.raises(ValueError, match="num_experts must be an integer from 1 to 4096, got 16777216"):
        ModelConfig.from_dict(written | {"num_experts": 1 << 24, "num_local_experts": None})


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize(("name", "value"), [("attn_logit_softcapping", 50.0), ("clip_qkv", 8)])
def test_a_field_of_another_architecture_is_refused(kind: str, name: str, value: object) -> None:
    written = {**AutoConfig.for_model(kind, **FOUR).to_dict(), "eos_token_id": None, "architectures": ["TheClass"]}
    with pytest.raises(ConfigError, match=rf"{name} is {value}"):
        ModelConfig.from_dict({**written, name: value})
    ModelConfig.from_dict({**written, name: None})


@pytest.mark.parametrize("kind", sorted({*DENSE} - {"llama", "mistral", "qwen2", "qwen3"}))
def test_a_field_that_is_not_known_is_refused_with_the_class(kind: str) -> None:
    written = {**AutoConfig.for_model(kind, **FOUR).to_dict(), "eos_token_id": None, "architectures": ["TheClass"]}
    harmless = {"_name": 1, "use_cache": True, "new_token_id": 3, "mlp_dropout": 0.5, "quirk": False}
    ModelConfig.from_dict(written | harmless)
    with pytest.raises(
        ConfigError, match=r"TheClass: quirk is 0.5, which is not known for this class and could change"
    ):
        ModelConfig.from_dict(written | {"quirk": 0.5})
    with pytest.raises(ConfigError, match=r"TheClass: rope_scaling.quirk is 'x', which is not known"):
        ModelConfig.from_dict(written | {"rope_scaling": {"rope_type": "default", "quirk": "x"}})


@pytest.mark.parametrize("kind", NEEDS)
def test_a_class_that_cannot_be_computed_is_refused_with_what_it_would_need(kind: str) -> None:
    assert kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind.removesuffix("_text") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert kind not in FAMILIES
    with pytest.raises(ConfigError, match=r"TheClass.*is not supported: .* need"):
        ModelConfig.from_dict({"model_type": kind, "architectures": ["TheClass"]})


def with_images(kind: str, text: str, **options: Any) -> Any:
    """A tiny model that also reads images, of transformers."""
    texts = {"model_type": text, **SIZES, "head_dim": 16, **options}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees = {"image_size": 28, "patch_size": 14, **small}
    vision = {"model_type": "siglip_vision_model" if kind == "gemma3" else "pixtral", **sees}
    more = {"image_token_id": 5, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    config = AutoConfig.for_model(kind, text_config=texts, vision_config=vision, **more)
    config.tie_word_embeddings = texts.get("tie_word_embeddings", False)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    quiet = tiny_model(text, **{key: value for key, value in texts.items() if key not in ("model_type",)})
    own = {name.removeprefix("model."): tensor for name, tensor in quiet.state_dict().items()}
    model.model.language_model.load_state_dict({name: own[name] for name in own if name != "lm_head.weight"})
    model.lm_head.load_state_dict({"weight": quiet.state_dict()["lm_head.weight"]})
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        ("gemma3", "gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2, "tie_word_embeddings": True}),
        ("mistral3", "mistral", {"sliding_window": None}),
        ("mistral3", "ministral3", {}),
    ],
)
def test_the_text_of_a_model_that_reads_images_is_that_of_transformers(
    kind: str, text: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = with_images(kind, text, **options)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    assert "only the text model is loaded; images are not read" in caplog.text
    assert model.config.model_type == config_of(tmp_path).model_type == text
    (prompt,) = prompts(300, [25])
    (answer,) = static(model).generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
    assert (logits(model, prompt) - wanted).abs().max() < 1e-4 * max(1, float(wanted.abs().max()))
    assert follows(oracle, prompt, answer.output_tokens)


class Zeros:
    faults, stored = (), dict[str, Any]()

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def nbytes(self, config: ModelConfig) -> None:
        return None

    def chunks(self, name: str) -> Iterator[Tensor]:
        yield torch.zeros(4)


def test_a_gguf_file_has_gemma_s_norms_as_the_decoder_multiplies_by_them(tmp_path: Path) -> None:
    """A checkpoint has them minus one; llama.cpp's converter adds the one."""
    config, file = ModelConfig.from_dict(tiny_model("gemma3_text").config.to_dict()), tmp_path / "model.gguf"
    file.touch()
    for place, wanted in ((tmp_path, 1.0), (file, 0.0)):
        (norm,) = translated(Zeros(place), config).chunks("model.layers.0.input_layernorm.weight")
        assert norm.tolist() == [wanted] * 4
