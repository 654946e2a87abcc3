"""Models that also read images: a config.json with a `text_config`, which is another family. Its text is served."""

from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError, check_choice
from phase2_prefill_decode.loading.families import FAMILIES, Family, read

TOP = "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype"  # they count more than the same in text_config


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must describe the text model of a {config['model_type']}, got {text!r}")
    texts = [name for name, other in FAMILIES.items() if "text_config" not in other.absent]
    kind = check_choice("text_config.model_type", text.get("model_type") or family.absent["text_config"], texts)
    return read({**text, **{name: config[name] for name in TOP if config.get(name) is not None}, "model_type": kind})


def wrapper(text: str) -> Family:
    """A wrapper. `text` is the model type of a text_config that does not name its own."""
    return Family(absent={"text_config": text}, ignored={}, read=_read)


GEMMA3_WITH_IMAGES, MISTRAL3 = wrapper("gemma3_text"), wrapper("mistral")
QWEN3_5_WITH_IMAGES, QWEN3_5_MOE_WITH_IMAGES = wrapper("qwen3_5_text"), wrapper("qwen3_5_moe_text")
