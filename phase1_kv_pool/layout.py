"""KVLayout: the shape of a KV cache, and how many bytes a token, a page or a request takes."""

from dataclasses import dataclass

from phase0_request.support.checks import check_choice, check_int

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

    # region exercise 1.1
    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: a key and a value per KV head and layer, each with a scale if it has 8 bits."""
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
