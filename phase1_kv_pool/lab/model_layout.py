"""The layout of a model's KV cache, by its config.json alone. The engine makes it of the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phase0_request.support.checks import check_int
from phase0_request.support.model_files import read_object
from phase1_kv_pool.layout import KVLayout


def layout_of(config: Mapping[str, Any] | str | Path, page_size: int = 16, dtype: str = "bfloat16") -> KVLayout:
    """Read a model's config.json in Hugging Face layout: from the file, its directory, or its parsed content."""
    if isinstance(config, Mapping):
        values = config
    else:
        file = Path(config)
        values = read_object(file / "config.json" if file.is_dir() else file)
    nested = values.get("text_config")  # multimodal models nest the language model's configuration
    values = nested if isinstance(nested, Mapping) else values
    if values.get("kv_lora_rank"):
        raise ValueError("this model caches one latent vector per token (MLA), not keys and values of heads")
    layers, heads = (check_int(name, values.get(name), 1) for name in ("num_hidden_layers", "num_attention_heads"))
    head_dim = values.get("head_dim")
    if not head_dim:
        head_dim, rest = divmod(check_int("hidden_size", values.get("hidden_size"), 1), heads)
        if rest:
            raise ValueError(f"hidden_size {values['hidden_size']} is no multiple of {heads} heads, so give head_dim")
    kv_heads = values.get("num_key_value_heads") or heads  # without it: multi-head attention
    return KVLayout(layers, kv_heads, head_dim, page_size, dtype)
