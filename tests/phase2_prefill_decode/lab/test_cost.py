"""The cost model against brute force over every pair, torch's FLOP counter on a transformers model, its parameters,
and published figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from phase0_request.batch import Batch, Slice
from phase0_request.core import CoreObserver, Step
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.families.experts import ExpertMLP
from phase2_prefill_decode.extras.families.layer import Experts, FamilyLayer
from phase2_prefill_decode.extras.families.stateful import DeltaLayer, GatedLayer
from phase2_prefill_decode.lab.cost import Cost, CostModel, Matrix, Part, seen
from phase2_prefill_decode.linear import TorchLinear
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import random_weights
from phase2_prefill_decode.model import Model
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


def test_activations_cross_the_memory_only_where_a_tensor_does_not_fit_the_cache() -> None:
    """In 50 MiB, decodes of an 8B model leave only their logits no room; a prompt of 2,048, its MLP's gate and up."""
    through, cached = CostModel(QWEN3_8B), CostModel(QWEN3_8B, cache=50 << 20)
    decodes, prompt = [(1100, 1)] * 256, [(0, 2048)]
    for pieces, crossing in ((decodes, {"head"}), (prompt, {"gate_up", "pointwise"})):
        every, some = through.pieces(pieces).parts, cached.pieces(pieces).parts
        assert {name for name, part in some.items() if part.activations} == crossing
        for name, part in some.items():
            assert replace(part, activations=every[name].activations) == every[name], "the rest is as without a cache"
    assert cached.pieces(decodes).total.activations == 256 * (4096 + 151936) * 2
    assert through.linear
    assert not cached.linear


@pytest.mark.parametrize(("part", "numbers"), [("qkv", 160), ("attention", 96), ("gate_up", 160), ("down", 80)])
def test_a_tensor_as_large_as_the_cache_fits(part: str, numbers: int) -> None:
    size = 9 * numbers * 2  # of nine tokens' largest
    for cache, fits in ((size, True), (size - 1, False)):
        counted = CostModel(SMALL, cache=cache).pieces([(0, 9)]).parts[part]
        assert (counted.activations == 0) == fits


class CountedSteps(CoreObserver):
    """The rows that each step of an engine multiplies, beside what the cost model says of it."""

    def __init__(self, config: ModelConfig) -> None:
        self.operations = self.weights = 0
        self.cost = CostModel(config, dtype="float32")
        self.seen: list[tuple[Cost, int, int]] = []
        counted = self

        class Counted(TorchLinear):
            def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
                counted.count(len(rows), self.weight, self.bias)
                return super().__call__(rows, out)

        self.model = Model.random(config, device="cpu", dtype="float32", backend=replace(TORCH, linear=Counted))
        for layer in self.model.decoder.layers:
            for name in ("_gate_up", "_down") if isinstance(layer.mlp, ExpertMLP) else ():
                setattr(layer.mlp.down_proj, name, partial(self.grouped, getattr(layer.mlp.down_proj, name)))

    def count(self, rows: int, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.operations += 2 * rows * weight.numel()
        self.weights += (rows > 0) * sum(t.nbytes for t in (weight, bias) if t is not None)

    def grouped(self, product: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for expert, own in enumerate(ends.diff(prepend=ends[:1] * 0).tolist()):
            self.count(own, product.args[0][expert])
        result: torch.Tensor = product(rows, ends)
        return result

    def planned(self, step: Step) -> None:
        self.operations = self.weights = 0
        self.planned_cost = self.cost.step(step.batch)

    def completed(self, step: Step) -> None:
        if step.batch.slices:
            self.seen.append((self.planned_cost, self.operations, self.weights))

    def run(self, lengths: Sequence[int]) -> Any:
        """Generate after prompts of these lengths. Returns the runner."""
        self.seen.clear()
        engine = static(self.model)
        engine.core.observers.append(self)
        prompts = [[(i * 7 + length) % 90 + 1 for i in range(length)] for length in lengths]
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        return engine.core.runner


EXPERTS = Experts(number=7, top_k=3, inner=24, norm_topk=True)
WITH_EXPERTS = replace(
    SMALL, model_type="qwen3_moe", layers=(FamilyLayer(experts=EXPERTS), FamilyLayer(), FamilyLayer(experts=EXPERTS))
)


def test_experts_are_counted_as_a_built_model_multiplies() -> None:
    """A token reads as many as it chooses. Of several tokens the weights are only an expectation."""
    counted = CountedSteps(WITH_EXPERTS)
    counted.run([9])
    for cost, operations, _ in counted.seen:
        assert cost.linears.operations + cost.head.operations == operations
    decodes = counted.seen[1:]
    assert len(decodes) == 5
    for cost, _, weights in decodes:
        assert cost.linears.weights + cost.head.weights == weights
    counted.run([9, 4, 1, 2])
    assert all(cost.linears.operations + cost.head.operations == operations for cost, operations, _ in counted.seen)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(5, 2, 3), (4, 1, 4), (6, 4, 2)])
def test_the_expected_share_of_experts_is_the_mean_over_all_choices(experts: int, top_k: int, tokens: int) -> None:
    choices = [*combinations(range(experts), top_k)]
    read = [len({expert for choice in chosen for expert in choice}) for chosen in product(choices, repeat=tokens)]
    matrix = Matrix("down", 8, 8 * experts, False, False, experts, top_k)
    assert matrix.expected(tokens) * experts == pytest.approx(fmean(read))


def test_layers_with_states_are_counted_as_a_built_model_computes() -> None:
    """Of each sequence the states are read and written, and only the other layers have keys and values."""
    delta = DeltaLayer(key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4)
    config = replace(SMALL, model_type="qwen3_5_text", layers=(delta, GatedLayer(), delta), qk_norm=True)
    counted = CountedSteps(config)
    runner = counted.run([9, 4, 1])
    for cost, operations, weights in counted.seen:
        assert cost.linears.operations + cost.head.operations == operations
        assert cost.linears.weights + cost.head.weights == weights
    (last, _, _) = counted.seen[-1]
    state = sum(tensor[0].nbytes for layer in runner.states for tensor in layer.tensors)
    keys = sum(length + 5 for length in (9, 4, 1))  # that the last decodes see, of one layer
    assert last.attention.kv_read == 3 * state + keys * 2 * 2 * 16 * 4
    assert last.attention.kv_write == 3 * state
    assert last.pointwise.kv_write == 3 * 2 * 2 * 16 * 4
    assert CostModel(config, dtype="float32").pieces([(0, 9), (100, 9)]).attention.kv_write == 2 * state
