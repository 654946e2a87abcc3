"""The cost model against brute force over every pair, torch's FLOP counter on a transformers model, its parameters,
and published figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.lab.cost import CostModel, Part, seen
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import random_weights
from tests.phase2_prefill_decode.steps import loaded
from tests.phase2_prefill_decode.tiny import windowed

SMALL = ModelConfig(
    vocab_size=300, num_hidden_layers=3, num_attention_heads=6, hidden_size=48, num_key_value_heads=2, head_dim=16,
    intermediate_size=80,
)  # fmt: skip
WINDOWED = replace(SMALL, layers=windowed(None, 7, 20))
QWEN3_8B = ModelConfig(
    vocab_size=151936, num_hidden_layers=36, num_attention_heads=32, hidden_size=4096, num_key_value_heads=8,
    head_dim=128, intermediate_size=12288, qk_norm=True,
)  # fmt: skip
LLAMA_8B = replace(QWEN3_8B, vocab_size=128256, num_hidden_layers=32, intermediate_size=14336, qk_norm=False, layers=())

starts, lengths = st.integers(0, 60), st.integers(1, 60)
windows = st.none() | st.integers(1, 130)


def every_pair(start: int, length: int, window: int | None) -> list[tuple[int, int]]:
    """The rule of attention, position by position."""
    return [
        (query, key)
        for query in range(start, start + length)
        for key in range(start + length)
        if key <= query and (window is None or query - key < window)
    ]


@pytest.mark.proof
@given(starts, lengths, windows)
def test_pairs_and_keys_are_those_of_brute_force(start: int, length: int, window: int | None) -> None:
    pairs = every_pair(start, length, window)
    wanted = len(pairs), len({key for _, key in pairs})
    assert seen(start, length, window) == wanted, f"(pairs, keys) of {length} tokens from {start}, window {window}"


@given(st.lists(st.tuples(starts, lengths), max_size=4), windows, windows)
def test_a_load_is_summed_over_layers_and_slices(
    pieces: Sequence[tuple[int, int]], one: int | None, two: int | None
) -> None:
    config = ModelConfig(
        vocab_size=9, num_hidden_layers=3, num_attention_heads=2, hidden_size=16, layers=windowed(one, two, one)
    )
    each = [every_pair(start, length, window) for start, length in pieces for window in (one, two, one)]
    load = CostModel(config).load(pieces, 1)
    slices = f"of slices (start, length) {list(pieces)} in three layers with windows {(one, two, one)}"
    assert load.tokens == sum(length for _, length in pieces), f"tokens {slices}"
    assert load.pairs == sum(map(len, each)), f"pairs {slices}"
    assert load.keys == sum(len({key for _, key in pairs}) for pairs in each), f"keys {slices}"
    assert load.yields == 1


def test_attention_is_counted_number_by_number() -> None:
    """A multiplication with its addition for each number of each query head and pair, twice; heads of K and V once."""
    model = CostModel(WINDOWED, dtype="float32", kv_dtype="bfloat16")
    pieces = [(0, 9), (30, 1), (4, 11)]
    operations = read = written = moved = 0
    for window in WINDOWED.windows:
        for start, length in pieces:
            pairs = every_pair(start, length, window)
            for _head in range(6):
                operations += sum(2 * 16 + 2 * 16 for _ in pairs)
                moved += length * (16 + 16) * 4
            for _kv_head in range(2):
                read += len({key for _, key in pairs}) * (16 + 16) * 2
                written += length * (16 + 16) * 2
    cost = model.pieces(pieces)
    wanted = Part(operations, kv_read=read, activations=moved)
    for field in ("operations", "kv_read", "activations"):
        counted, right = getattr(cost.attention, field), getattr(wanted, field)
        assert counted == right, f"{field} of attention: {counted:,}, counted one by one {right:,} (KV in bfloat16)"
    assert cost.attention == wanted, "nothing else belongs to attention"
    assert cost.pointwise.kv_write == cost.total.kv_write == written
    assert cost.total.kv_read == read


@pytest.mark.proof
def test_a_prefill_has_the_operations_that_torch_counts() -> None:
    """Transformers computes the logits of every token, so every token yields here. It multiplies the whole square of
    queries and keys, and then hides half of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    n, sizes = 37, {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(n)[None])
    flops = Counter[str]()  # of each kind of module, in all layers
    for name, counts in counter.get_flop_counts().items():
        flops[name.rpartition(".")[2]] += sum(counts.values())
    cost = CostModel(SMALL).pieces([(0, n)], yields=n)
    assert cost.qkv.operations == flops["q_proj"] + flops["k_proj"] + flops["v_proj"]
    assert cost.out.operations == flops["o_proj"]
    assert cost.gate_up.operations == flops["gate_proj"] + flops["up_proj"]
    assert cost.down.operations == flops["down_proj"]
    assert cost.head.operations == flops["lm_head"]
    projections = sum(flops[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    square = flops["self_attn"] - projections
    assert cost.attention.operations * 2 * n == square * (n + 1)


def test_the_decoder_multiplies_as_many_rows_as_the_model_counts() -> None:
    """Rows through every matrix of the decoder itself: in its last layer and its head only those that yield a token."""
    operations, weights = 0, 0

    class Counted:
        kernel = "counted"

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            self.weight, self.bias = weight, bias

        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal operations, weights
            operations += 2 * len(x) * self.weight.numel()
            weights += len(x[:1]) * sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
            return linear(x, self.weight, self.bias)

    config = replace(WINDOWED, qkv_bias=True, qk_norm=True)
    backend = replace(TORCH, linear=Counted)
    model = Decoder(config, random_weights(replace(config, dtype="float32")), backend)
    cache, pool = PagedCache(num_pages=8, page_size=16), KVPool(config.kv_layout(16), 8, dtype=torch.float32)
    requests = [Request("a", (1,) * 12), Request("b", (2,) * 50), Request("c", (3,) * 9)]
    for request in requests:
        request.admit(0.0)
        cache.attach(request)
        cache.grow(request, request.total)
    for ends in ((12, 20, 9), (5, 50, 1), (5, 20, 1)):
        operations = weights = 0
        batch = Batch(tuple(Slice(request, 0, end) for request, end in zip(requests, ends, strict=True)))
        model(loaded(batch, cache), pool.layers)
        cost = CostModel(config, dtype="float32").step(batch)
        step = f"a step that computes prompts of 12, 50 and 9 tokens up to {ends}: which rows go on after attention?"
        assert operations == cost.linears.operations + cost.head.operations, f"operations of {step}"
        assert weights == cost.linears.weights + cost.head.weights, f"weights of {step}"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("config", "weights_ms", "us_a_thousand"), [(QWEN3_8B, 3.15, 30.7), (LLAMA_8B, 3.1, 27.3)], ids=["qwen3", "llama"]
)
def test_published_floors_of_a_decode_step(config: ModelConfig, weights_ms: float, us_a_thousand: float) -> None:
    """At the 4.8 TB/s of an H200's datasheet: its weights, and every thousand tokens in its cache."""
    model, bandwidth = CostModel(config, dtype="bfloat16"), 4.8e12
    short, long = model.pieces([(1000, 1)]).total, model.pieces([(2000, 1)]).total
    assert short.weights / bandwidth * 1e3 == pytest.approx(weights_ms, rel=0.01)
    assert (long.bytes - short.bytes) / bandwidth * 1e6 == pytest.approx(us_a_thousand, abs=0.05)
