"""Graphs and one step ahead on a CPU, with a recorder that is as strict about memory as CUDA graphs: the same tokens as
without either, while the pool runs out and prefixes are shared."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from phase0_request.batch import StepOutput
from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import triton_backend
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.grammar import masks
from phase2_prefill_decode.extras.grammar.mask import apply_mask_on
from phase2_prefill_decode.extras.piecewise import record_pieces
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.triton_product import TritonProduct
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.linear import Linear, TorchLinear
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import random_weights
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import LaunchedStep, ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras import invariants
from phase5_continuous.scheduler import Scheduler
from tests.gpu.captured import NotCapturedError, Recorder
from tests.phase2_prefill_decode.tiny import windowed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

VOCABULARY, CONTEXT, PAGES, PAGE_SIZE, RUNNING = 48, 64, 10, 4, 6  # pages for one request, and little more
SIZES = (1, 2, 4)
CONFIG = ModelConfig(
    vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, qk_norm=True, max_position_embeddings=CONTEXT, layers=windowed(None, 9),
    dtype="float32",
)  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_p": 0.8},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "min_tokens": 3, "prompt_logprobs": 1},
    {"logit_bias": {3: 2.0}},
    {"allowed_token_ids": tuple(range(0, VOCABULARY, 2))},
)
MATRICES = "qkv_proj", "o_proj", "gate_up_proj", "down_proj"
COUNTS = (3, 7, 14)  # tokens, the last as many as the budget
WAYS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {  # sizes of decode steps, steps ahead, pieces
    "graphs": (SIZES, 0, ()),
    "ahead": ((), 1, ()),
    "graphs-ahead": (SIZES, 1, ()),
    "piecewise": (SIZES, 0, COUNTS),
    "piecewise-ahead": (SIZES, 1, COUNTS),
}


@pytest.fixture(autouse=True)
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "apply_mask_on", lambda device: apply_mask_on(torch.device("cuda")))


@cache
def model(scheme: str | None = None) -> Model:
    """A model with the products of a GPU, for those of a CPU are not recorded. With a scheme, of quantized weights."""
    weights = random_weights(CONFIG, "cpu", seed=3)
    if scheme is not None:
        table = quantize(weights.embed_tokens, scheme)
        layers = [layer | {name: quantize(layer[name], scheme) for name in MATRICES} for layer in weights.layers]
        weights = replace(weights, embed_tokens=table, lm_head=table, layers=layers)

    def multiply_as_on_a_gpu(weight: Any, bias: Tensor | None = None) -> Linear:
        return (TritonProduct if isinstance(weight, QuantizedWeight) else TorchLinear)(weight, bias)

    return Model(CONFIG, Decoder(CONFIG, weights, replace(triton_backend(), linear=multiply_as_on_a_gpu)))


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a run."""

    tokens: list[list[int]]
    errors: list[str]
    preemptions: int
    hit_tokens: int
    replays: int
    eager: int  # steps launched kernel by kernel


def arrivals(rng: random.Random, count: int) -> list[tuple[int, tuple[int, ...], SamplingParams]]:
    """The step before which each request comes, its prompt and what it asks for, in order. Many share a prefix."""
    shared, made = rng.choices(range(VOCABULARY), k=12), []
    for step in sorted(rng.choices(range(12), k=count)):
        own = rng.choices(range(VOCABULARY), k=rng.randint(1, 10))
        kind = rng.choice(KINDS) if rng.random() < 0.6 else {"temperature": 0}
        params = SamplingParams(max_tokens=rng.randint(2, 12), seed=rng.randint(0, 99), ignore_eos=True, **kind)
        made.append((step, (*shared[: rng.choice((0, 8, 12))], *own), params))
    return made


def play(
    seed: int,
    sizes: Sequence[int] = (),
    ahead: int = 0,
    runner_type: type[ModelRunner] = ModelRunner,
    count: int = 8,
    scheme: str | None = None,
    counts: Sequence[int] = (),
) -> Played:
    """Serve random requests with recorded steps of these sizes, so many steps ahead, and pieces of so many tokens."""
    prefix_cache, recorder = PrefixCache(PAGES, PAGE_SIZE), Recorder()
    pool = KVPool(CONFIG.kv_layout(PAGE_SIZE), PAGES, "cpu", torch.float32)
    scheduler = Scheduler(prefix_cache, (), TokenBudget(9, 14), max_running=RUNNING, watermark=0, ahead=ahead)
    state = DeviceState(pool.device, 2 * RUNNING, CONTEXT // PAGE_SIZE)
    played = model(scheme)
    played.decoder.rope(CONTEXT)
    runner = runner_type(played.decoder, pool, prefix_cache, sampler_for(played, 0), state, ahead=ahead > 0)
    if sizes:
        if counts:
            record_pieces(runner, counts, CONTEXT, recorder)
        runner.record(sizes, CONTEXT, recorder)
    core = EngineCore(scheduler, runner)
    coming, requests, steps = arrivals(random.Random(seed), count)[::-1], list[Request](), 0
    with patch.object(played.decoder, "hidden", Mock(wraps=played.decoder.hidden)) as eager:
        while coming or core.has_work:
            while coming and coming[-1][0] <= steps:
                _, prompt, params = coming.pop()
                requests.append(Request(f"{len(requests)}", prompt, params))
                core.submit(requests[-1])
            core.step()
            invariants.check(scheduler)
            steps += 1
    return Played(
        [request.output_tokens for request in requests],
        [request.error for request in requests if request.error is not None],
        scheduler.running_set.num_preemptions,
        prefix_cache.counts.hit_tokens,
        recorder.replays,
        eager.call_count,
    )


@cache
def eager(seed: int, count: int = 8, scheme: str | None = None) -> Played:
    return play(seed, count=count, scheme=scheme)


FAST = [("graphs-ahead", None), ("piecewise-ahead", "int4")]
SLOW = [(way, None) for way in WAYS if way != "graphs-ahead"]


@pytest.mark.parametrize(("way", "scheme"), [*FAST, *(pytest.param(*way, marks=pytest.mark.slow) for way in SLOW)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_tokens_are_those_of_eager_steps_while_the_pool_runs_out_and_prefixes_are_shared(
    seed: int, way: str, scheme: str | None
) -> None:
    sizes, ahead, counts = WAYS[way]
    played, wanted = play(seed, sizes, ahead, scheme=scheme, counts=counts), eager(seed, scheme=scheme)
    assert played.errors == wanted.errors == []
    assert played.tokens == wanted.tokens
    assert min(played.preemptions, wanted.preemptions, played.hit_tokens) > 0
    assert (played.replays > 5) == bool(sizes)
    assert (played.eager == 0) == bool(counts)  # else prompts are launched kernel by kernel


class KeepsItsInput(ModelRunner):
    """Makes the input of a recorded step anew, where the graph does not read it."""

    def forward(self, step: PackedStep) -> Computed:
        if self.graphs is None or not step.graph_size:
            return super().forward(step)
        step.to(self.pool.device)
        return self.graphs._graphs[step.graph_size].run()


@dataclass(frozen=True)
class Unfetched:
    """The result of a step, still where the graph wrote it."""

    step: PackedStep
    draws: tuple[torch.Tensor, torch.Tensor]

    def output(self) -> StepOutput:
        return LaunchedStep(self.step, *self.draws).output()


class ReadsLate(ModelRunner):
    """Reads the result of a recorded step when it is asked for: the next step may have been launched."""

    def launch(self, step: PackedStep) -> Any:
        if not step.graph_size or step.works:
            return super().launch(step)
        computed = self.forward(step)
        self.cache.changed.clear()
        assert computed.draws is not None
        return Unfetched(step, computed.draws)


@pytest.mark.parametrize(("runner_type", "ahead"), [(KeepsItsInput, 0), (ReadsLate, 1)])
def test_a_runner_that_graphs_would_break_gives_other_tokens_here_too(
    runner_type: type[ModelRunner], ahead: int
) -> None:
    assert play(0, (4,), ahead, runner_type, count=3).tokens != eager(0, count=3).tokens


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "a list from the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("read", READS)
def test_a_capture_that_reads_the_device_raises(read: str) -> None:
    x = torch.arange(3.0)
    with pytest.raises(NotCapturedError):
        Recorder()(lambda: READS[read](x))
