"""KVLayout: the shape of a KV cache, and how many bytes a token, a page or a request takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phase0_request.support.checks import check_choice, check_int
from phase0_request.support.model_files import read_object

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of models
KV_DTYPES = "int8", "fp8"  # of keys and values in 8 bits, which have scales
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a model's KV cache: layers, KV heads, head dimension, page size and dtype."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_size"):
            check_int(name, getattr(self, name), 1)
        check_choice("dtype", self.dtype, (*DTYPE_BYTES, *KV_DTYPES))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, page_size: int = 16, dtype: str = "bfloat16"
    ) -> "KVLayout":
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
                raise ValueError(
                    f"hidden_size {values['hidden_size']} is no multiple of {heads} heads, so give head_dim"
                )
        kv_heads = values.get("num_key_value_heads") or heads  # without it: multi-head attention
        return cls(layers, kv_heads, head_dim, page_size, dtype)

    # region exercise 1.1
    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: a key and a value in every layer, for every KV head. In 8 bits each has a scale."""
        in_8_bits = self.dtype in KV_DTYPES
        head = self.head_dim + SCALE_BYTES if in_8_bits else self.head_dim * DTYPE_BYTES[self.dtype]
        return 2 * self.layers * self.kv_heads * head

    @property
    def bytes_per_page(self) -> int:
        return self.page_size * self.bytes_per_token

    def pages_for(self, tokens: int) -> int:
        """The number of pages that hold `tokens` tokens of one request; the last may be partly empty."""
        return -(-tokens // self.page_size)

    def pages_in(self, memory: int) -> int:
        """The number of pages that fit in `memory` bytes."""
        return max(memory, 0) // self.bytes_per_page

    def tokens_in(self, memory: int) -> int:
        """The number of tokens that fit in `memory` bytes, in whole pages."""
        return self.pages_in(memory) * self.page_size

    def requests_in(self, memory: int, tokens: int) -> int:
        """The number of requests of `tokens` tokens each that fit in `memory` bytes."""
        if tokens < 1:
            raise ValueError(f"a request has at least 1 token, got {tokens}")
        return self.pages_in(memory) // self.pages_for(tokens)

    # endregion
