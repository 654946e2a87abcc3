"""CostModel: counts the operations and the bytes of a step before it runs. Integers only; nothing is measured.

A step is known by a few sums over its slices (`Load`), and its cost is linear in them. The counts are those of a
perfect machine: a kernel reads from memory what it needs once and writes what it makes once, and a weight is read once
a step, however many tokens it meets. A multiplication with its addition is two operations. Only matrix products and
attention count as operations; norms, rotations, gates and the rules of states are a few percent of those, so of them
only the bytes count.

Between two kernels, activations stay in the device's cache if it holds them. With the size of a cache, a part's
activations cross the memory only if the largest of its tensors does not fit. Without, they always do.

Experts are the exception: a step reads those that some token chose. How many that will be is not known, so it is what
is expected if each token chooses independently and all experts are equally likely. Real routers are less even, and
read fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from phase0_request.batch import Batch
from phase0_request.support.checks import check_choice
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode.extras.families.stateful import state_bytes

if TYPE_CHECKING:  # only its numbers are used, and a configuration may load torch
    from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig


class Load(NamedTuple):
    """The sums that the cost of a step depends on."""

    tokens: int = 0  # that it computes
    pairs: int = 0  # of a query and a key that it sees, in all layers
    keys: int = 0  # read from pages, each with its value, in all layers
    yields: int = 0  # sequences that yield a token
    states: int = 0  # sequences with states, each read and written once


@dataclass(frozen=True, slots=True)
class Part:
    """The operations and bytes of one kind of kernel in a step, in all layers."""

    operations: int = 0
    weights: int = 0  # bytes, as all that follow
    kv_read: int = 0
    kv_write: int = 0
    activations: int = 0  # in and out

    @property
    def bytes(self) -> int:
        return self.weights + self.kv_read + self.kv_write + self.activations

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations per byte."""
        return self.operations / self.bytes if self.bytes else 0.0

    def __add__(self, other: Part) -> Part:
        return Part(*map(add, astuple(self), astuple(other)))


NOTHING = Part()


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step, by part."""

    qkv: Part = NOTHING
    attention: Part = NOTHING  # queries with keys, and weights with values; causal pairs only. Or states
    out: Part = NOTHING
    gate_up: Part = NOTHING
    down: Part = NOTHING
    head: Part = NOTHING
    pointwise: Part = NOTHING  # embedding, norms, rotation and the store of K and V, gate

    @property
    def parts(self) -> dict[str, Part]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def linears(self) -> Part:
        return self.qkv + self.out + self.gate_up + self.down

    @property
    def total(self) -> Part:
        return self.linears + self.attention + self.head + self.pointwise

    @property
    def operations(self) -> int:
        return self.total.operations

    @property
    def bytes(self) -> int:
        return self.total.bytes

    @property
    def intensity(self) -> float:
        return self.total.intensity


# region exercise 2.1
def seen(start: int, length: int, window: int | None = None) -> tuple[int, int]:
    """(pairs, keys) of one slice in one layer: pairs of a query and a key that it sees, and keys that any query sees.

    The query at position p sees p + 1 keys, or with a window only the last `window` of them.
    """
    stop = start + length
    if window is None or window >= stop:
        return length * (start + 1 + stop) // 2, stop
    return _pairs_before(stop, window) - _pairs_before(start, window), min(stop, length - 1 + window)


# endregion


def _pairs_before(stop: int, window: int) -> int:
    """Pairs of the first `stop` queries: a triangle until the window is full, then `window` for each."""
    short = min(stop, window)
    return short * (short + 1) // 2 + (stop - short) * window


class Matrix(NamedTuple):
    """A matrix of layers. That of experts is the matrices of all, one after the other."""

    part: str  # of a Cost
    inputs: int
    outputs: int
    bias: bool
    last: bool  # in the last layer, behind attention, where only rows that yield a token go on
    experts: int = 1
    top_k: int = 1  # that a row goes through

    @property
    def widest(self) -> int:
        """Numbers of a row's input or of its output, whichever are more."""
        return self.top_k * max(self.inputs, self.outputs // self.experts)

    def expected(self, rows: int) -> float:
        """The share of it that some row goes through."""
        return 1 - (1 - self.top_k / self.experts) ** rows if rows else 0.0


PARTS = {"qkv_proj": "qkv", "in_proj": "qkv", "o_proj": "out", "out_proj": "out", "gate_proj": "out"}


def matrices(config: ModelConfig, layer: LayerConfig, last: bool) -> Iterator[Matrix]:
    """The matrices of a layer."""
    experts = getattr(layer, "experts", None)
    for name, tensor in layer.tensors(config).items():
        if not tensor.inputs:
            continue
        part = PARTS.get(name) or ("down" if name.endswith("down_proj") else "gate_up")
        several = (1, 1)
        if experts is not None and name in ("gate_up_proj", "down_proj"):
            several = experts.number, experts.top_k
        outputs = sum(tensor.modules.values())
        yield Matrix(part, tensor.inputs, outputs, tensor.bias, last and part != "qkv", *several)


class CostModel:
    """The costs of one model's steps.

    Weights and activations are kept in `dtype`, by default the configuration's; keys and values in `kv_dtype`, by
    default the same. `cache` is the size of the device's cache in bytes.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: str | None = None, kv_dtype: str | None = None, cache: int = 0
    ) -> None:
        self.config = config
        self.cache = cache
        self.dtype = dtype or config.dtype
        self.kv_dtype = kv_dtype or self.dtype
        self._bytes, self._kv_bytes = (
            DTYPE_BYTES[check_choice("dtype", d, DTYPE_BYTES)] for d in (self.dtype, self.kv_dtype)
        )
        *others, last = config.layers
        self._matrices = Counter(matrices(config, last, True))  # how many layers have each
        for layer, count in Counter(others).items():
            self._matrices.update(dict.fromkeys(matrices(config, layer, False), count))
        self._attending = [layer for layer in config.layers if layer.paged]
        self._windows = tuple(Counter(layer.window for layer in self._attending).items())  # (window, layers with it)
        self._state_bytes = state_bytes(replace(config, dtype=self.dtype))
        self._widest = max(matrix.widest for matrix in self._matrices)
        self._q = config.num_attention_heads * config.head_dim
        self._kv = config.num_key_value_heads * config.head_dim

    @property
    def linear(self) -> bool:
        """Whether the cost of a step is linear in its load: of a model without experts, on a device without a cache."""
        return not self.cache and all(matrix.experts == 1 for matrix in self._matrices)

    @property
    def calls(self) -> int:
        """Operators that the host starts for a step of a dense model: nine a layer, embedding, last norm, head, two to
        pick rows."""
        return 9 * self.config.num_hidden_layers + 5

    def step(self, batch: Batch) -> Cost:
        """The cost of a batch. To be called before the batch is committed."""
        return self.cost(self.load(((s.start, s.length) for s in batch), sum(s.completes for s in batch)))

    def pieces(self, pieces: Iterable[tuple[int, int]], yields: int | None = None) -> Cost:
        """The same from (start, length) of each slice. So many slices yield a token; by default each does."""
        return self.cost(self.load(pieces, yields))

    def load(self, pieces: Iterable[tuple[int, int]], yields: int | None = None) -> Load:
        """The sums of a step. They are additive."""
        tokens = pairs = keys = count = 0
        for start, length in pieces:
            count += 1
            tokens += length
            for window, layers in self._windows:
                more_pairs, more_keys = seen(start, length, window)
                pairs += layers * more_pairs
                keys += layers * more_keys
        return Load(tokens, pairs, keys, count if yields is None else yields, count if self._state_bytes else 0)

    def cost(self, load: Load) -> Cost:
        """The cost of a step with this load."""
        if not load.tokens:
            return Cost()
        states = load.states * self._state_bytes
        parts = {
            "attention": self._crossing(self._attention(load), load.tokens * self._q)
            + Part(kv_read=states, kv_write=states),
            "head": self._linear(Matrix("head", self.config.hidden_size, self.config.vocab_size, False, True), load),
            "pointwise": self._crossing(self._pointwise(load), load.tokens * self._widest),
        }
        for matrix, layers in self._matrices.items():
            parts[matrix.part] = parts.get(matrix.part, NOTHING) + self._linear(matrix, load, layers)
        return Cost(**parts)

    def _crossing(self, part: Part, largest: int) -> Part:
        """The part, without its activations if the cache holds the largest of them, of so many numbers."""
        return replace(part, activations=0) if largest * self._bytes <= self.cache else part

    def _rows(self, load: Load) -> tuple[int, int]:
        """(layers, rows in all of them) behind attention. In the last layer only rows that yield a token go on."""
        others = self.config.num_hidden_layers - 1
        return others + min(load.yields, 1), others * load.tokens + load.yields

    def _linear(self, matrix: Matrix, load: Load, layers: int = 1) -> Part:
        """A step's rows through a matrix of this shape in each of so many layers: each row [inputs] -> [outputs], and
        with experts `top_k` times through one of them."""
        rows = load.yields if matrix.last else load.tokens
        whole, inputs, outputs = (matrix.inputs + matrix.bias) * matrix.outputs, matrix.inputs, matrix.outputs
        weights = whole * min(rows, 1) if matrix.experts == 1 else round(whole * matrix.expected(rows))
        through = layers * rows * matrix.top_k
        part = Part(
            operations=2 * through * inputs * (outputs // matrix.experts),
            weights=layers * weights * self._bytes,
            activations=through * (inputs + outputs // matrix.experts) * self._bytes,
        )
        return self._crossing(part, rows * matrix.widest)

    # region exercise 2.1
    def _attention(self, load: Load) -> Part:
        """Each query head multiplies with the keys that it sees, and then weighs their values.

        A key and its value are read once for all query heads that share them and all queries of a slice. Queries and
        results count as `activations`. `load` has sums over slices and layers, except `tokens`, the step's. Only the
        layers `self._attending` have attention.
        """
        products = 2 * load.pairs * self._q  # a query with a key, and a weight with a value
        read = 2 * load.keys * self._kv  # a key and a value
        queries_and_results = 2 * load.tokens * len(self._attending) * self._q
        return Part(
            operations=2 * products,
            kv_read=read * self._kv_bytes,
            activations=queries_and_results * self._bytes,
        )

    # endregion

    def _pointwise(self, load: Load) -> Part:
        c, (layers_behind, rows_behind) = self.config, self._rows(load)
        attending = len(self._attending)
        norm = 4 * c.hidden_size  # what came out of a layer and the residual go in, the normed sum and the sum come out
        inside = attending * load.tokens * (2 * self._q + 2 * self._kv)  # q, k, v go in, q comes out, K and V to pages
        for matrix, layers in self._matrices.items():  # of an MLP, gate and up go in, their product comes out
            if matrix.part == "down":
                inside += 3 * layers * (load.yields if matrix.last else load.tokens) * matrix.top_k * matrix.inputs
        norms = (
            c.num_hidden_layers + layers_behind + min(load.yields, 1)
        ) * c.hidden_size + c.qk_norm * 2 * attending * c.head_dim
        rows = c.num_hidden_layers * load.tokens + rows_behind + load.yields  # that are normed
        moved = rows * norm + inside + load.tokens * c.hidden_size
        return Part(
            weights=(norms + load.tokens * c.hidden_size) * self._bytes,  # a row of the embedding for each token
            kv_write=2 * attending * load.tokens * self._kv * self._kv_bytes,
            activations=moved * self._bytes,
        )
