"""ModelConfig: the shape of a model. From a config.json in Hugging Face's form, or by hand from four numbers.

Llama, Mistral, Qwen2 and Qwen3 are one architecture. What they differ in (biases, norms of q and k, windows) is a field
here, and nothing behind this module asks for the family again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phase0_request.model_files import read_object
from phase1_kv_pool.layout import DTYPE_BYTES, KVLayout
from phase2_prefill_decode.families import FAMILIES, as_written, eos_ids, read
from phase2_prefill_decode.fields import ConfigError, flag, integer, number, one_of
from phase2_prefill_decode.rope import MAX_LENGTH, Rope

MAX_VOCABULARY = 1 << 31  # token ids travel as int32
MAX_SIZE = 1 << 24  # of anything else
HEAD_DIMS = range(8, 257, 8)  # what the kernels take


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The four sizes are required. A size of 0 means what models of that width usually have."""

    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_kv_head: int = 0  # 0: n_head
    head_dim: int = 0  # 0: n_embd / n_head
    n_inner: int = 0  # 0: 8/3 of n_embd, up to a multiple of 64
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    max_length: int = 2048  # tokens of context
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the head is the embedding
    windows: tuple[int | None, ...] = ()  # for each layer how many tokens it sees, its own among them; None: all
    eos_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # that the weights are kept in
    family: str = "llama"

    def __post_init__(self) -> None:
        integer("vocab_size", self.vocab_size, 1, MAX_VOCABULARY)
        for name in ("n_layer", "n_head", "n_embd"):
            integer(name, getattr(self, name), 1, MAX_SIZE)
        for name in ("n_kv_head", "head_dim", "n_inner"):
            integer(name, getattr(self, name), 0, MAX_SIZE)
        self._fill_in()
        if self.n_head % self.n_kv_head:
            raise ConfigError(f"n_head must be a multiple of n_kv_head, got {self.n_head} and {self.n_kv_head}")
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim must be a multiple of 8 from 8 to 256, got {self.head_dim}")
        number("norm_eps", self.norm_eps, 0)
        integer("max_length", self.max_length, 1, MAX_LENGTH)
        for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tied"):
            flag(name, getattr(self, name))
        self._check_lists()
        one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        one_of("family", self.family, FAMILIES)

    def _fill_in(self) -> None:
        for name in ("windows", "eos_ids"):
            if not isinstance(getattr(self, name), tuple | list):
                raise ConfigError(f"{name} must be a tuple, got {getattr(self, name)!r}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd {self.n_embd} is no multiple of its {self.n_head} heads, and head_dim is not given"
            )
        values: dict[str, object] = {
            "n_kv_head": self.n_kv_head or self.n_head,
            "head_dim": self.head_dim or self.n_embd // self.n_head,
            "n_inner": self.n_inner or -(-8 * self.n_embd // (3 * 64)) * 64,
            "windows": tuple(self.windows) or (None,) * self.n_layer,
            "eos_ids": tuple(self.eos_ids),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the one place where a frozen field is given its canonical form

    def _check_lists(self) -> None:
        if not isinstance(self.rope, Rope):
            raise ConfigError(f"rope must be a Rope, got {self.rope!r}")
        if len(self.windows) != self.n_layer:
            raise ConfigError(f"windows must be one for each of {self.n_layer} layers, got {len(self.windows)}")
        for window in self.windows:
            if window is not None:
                integer("a window", window, 1, MAX_LENGTH)
        for token in self.eos_ids:
            integer("an id of eos_ids", token, 0, self.vocab_size - 1)

    @classmethod
    def from_pretrained(cls, directory: str | Path, dtype: str | None = None) -> "ModelConfig":
        """From a model's directory. Tokens that end an answer are named in config.json, in generation_config.json or
        in both; all of them count. `dtype` is for who keeps the weights in another one than the file says."""
        file = Path(directory) / "config.json"
        config = _json(file) | ({} if dtype is None else {"dtype": dtype})
        generation = Path(directory) / "generation_config.json"
        if generation.exists():
            more = _json(generation)
            with _naming(generation):
                ends = eos_ids(more)
            with _naming(file):
                ends = (*eos_ids(config), *ends)
            config |= {"eos_token_id": list(ends)} if ends else {}
        with _naming(file):
            return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """From the content of a config.json. What is absent is what transformers takes it for."""
        try:
            return cls(**read(config))
        except ConfigError as error:
            raise ConfigError(as_written(str(error))) from None

    def kv_layout(self, page_size: int = 16, dtype: str | None = None) -> KVLayout:
        """What a token of this model costs in a cache."""
        return KVLayout(self.n_layer, self.n_kv_head, self.head_dim, page_size, dtype or self.dtype)

    @property
    def parameters(self) -> int:
        """How many numbers the model has learned; a tied head counts once."""
        q, kv = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        attention = (self.n_embd + self.qkv_bias) * (q + 2 * kv) + (q + self.out_bias) * self.n_embd
        mlp = (self.n_embd + self.mlp_bias) * 2 * self.n_inner + (self.n_inner + self.mlp_bias) * self.n_embd
        norms = 2 * self.n_embd + self.qk_norm * 2 * self.head_dim
        ends = (1 if self.tied else 2) * self.vocab_size * self.n_embd + self.n_embd
        return self.n_layer * (attention + mlp + norms) + ends

    @property
    def bytes(self) -> int:
        """What they take in `dtype`."""
        return self.parameters * DTYPE_BYTES[self.dtype]


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except OSError as error:
        raise ConfigError(f"a model's directory holds a {file.name}; {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
