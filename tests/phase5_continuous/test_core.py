"""EngineCore over a model: batching does not change a request's output, which is that of transformers."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phase0_request.core import EngineCore, Launched
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode import engine as engine_module
from phase2_prefill_decode.connect import runner_for
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.graphs import Computed, Replay
from phase2_prefill_decode.step.packed import PackedStep
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.extras.invariants import check
from phase5_continuous.policies import LongestPrefixFirst
from phase5_continuous.scheduler import Scheduler
from tests.phase2_prefill_decode.models import saved, tiny_model

VOCABULARY = 307
ANSWER = 24
PROMPTS = ["What is a KV cache?", "Hello!", "Why does paging matter?", "How does a radix tree work?"]


@pytest.fixture(params=["in turn", "ahead", "recorded", "drafts"], autouse=True)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each test runs in four ways: a step is read before the next one is launched, or after, or after and with decode
    steps recorded as on a GPU, or before and with drafts, most of them wrong."""
    steps = int(request.param in ("ahead", "recorded"))
    config = {"method": "ngram", "prompt_lookup_min": 1, "spare_rows": 64} if request.param == "drafts" else None
    monkeypatch.setitem(continuous.__kwdefaults__, "speculative_config", config)
    monkeypatch.setitem(continuous.__kwdefaults__, "ahead", steps)
    if request.param == "recorded":
        monkeypatch.setattr(engine_module, "runner_for", recorded_runner)
    return steps


def recorded_runner(decoder: Decoder, cache: PagedCache, sampler: Sampler, _: None, *, ahead: bool) -> ModelRunner:
    """A runner that replays its decode steps: it computes them again over the tensors that they were recorded with, and
    writes the results where they were the first time."""

    def record(run: Replay) -> Replay:
        kept = run()
        assert kept.draws is not None

        def replay() -> Computed:
            again = run()
            for old, new in zip(results(kept), results(again), strict=True):
                old.copy_(new)
            return kept

        return replay

    runner = runner_for(decoder, cache, sampler, None, (128, 64), ahead=ahead)
    runner.record([1, 2, 4, 6], decoder.config.max_position_embeddings, record)
    runner.compute = only_mixed(runner.compute)  # type: ignore[method-assign]
    return runner


def results(computed: Computed) -> list[torch.Tensor]:
    assert computed.draws is not None
    return [computed.logits, *computed.draws]


def only_mixed(compute: Callable[..., Computed]) -> Callable[..., Computed]:
    """Refuse to launch a decode step that a graph holds."""

    def checked(step: PackedStep, lists: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> Computed:
        mixed = step.max_seqlen_q > 1 or not step.all_logits
        assert not step.sizes or mixed or len(step.table_rows) > 6 or len(step.changed) > 2
        return compute(step, lists, out)

    return checked


@pytest.fixture(scope="module")
def oracle() -> Any:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def small(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = saved(oracle, tmp_path_factory.mktemp("model"))
    return Model.load(directory, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def chatty() -> Model:
    return Model.load(device="cpu", dtype="float32")


def alone(oracle: Any, prompt: tuple[int, ...], answer: list[int]) -> list[int]:
    """transformers' greedy token after the prompt and each beginning of this answer: the answer itself, if right."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    found: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return found[: len(answer)]


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Requests of which half share a prefix with another one, some of them more than a page."""
    beginnings = [tuple(rng.choices(range(3, VOCABULARY), k=22)) for _ in range(3)]
    made = []
    for number in range(count):
        own = tuple(rng.choices(range(3, VOCABULARY), k=rng.choice((1, 3, 4, 5, 17, 40))))
        prompt = rng.choice(beginnings)[: rng.choice((0, 8, 22))] + own
        params = SamplingParams(temperature=0, max_tokens=rng.randint(2, ANSWER), ignore_eos=True)
        made.append(Request(f"r{number}", prompt, params, priority=rng.randint(-1, 1)))
    return made


def play(loop: EngineCore[Scheduler, PackedStep], requests: list[Request], rng: random.Random) -> dict[str, list[int]]:
    """Submit requests at random moments, and abort one in five at a random moment. Returns the delivered tokens."""
    coming, delivered = requests[::-1], {request.id: list[int]() for request in requests}
    leaving = {request.id: rng.randint(0, 30) for request in requests if rng.random() < 0.2}
    ended = set[str]()
    while coming or loop.has_work:
        while coming and rng.random() < 0.4:
            loop.submit(coming.pop())
        step = loop.step()
        check(loop.scheduler)
        for request, token, reason, _ in step.events if step else ():
            assert request.id not in ended
            if token is not None:
                delivered[request.id].append(token)
            if reason is not None:
                ended.add(request.id)
        for request in requests[: len(requests) - len(coming)]:
            if request.id in leaving:
                leaving[request.id] -= 1
                if leaving[request.id] == 0:
                    loop.abort(request)
    assert ended == {request.id for request in requests}
    return delivered


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [PagedCache, PrefixCache])
def test_each_request_of_any_batch_has_the_output_of_transformers(
    small: Model, oracle: Any, kind: type[PagedCache], seed: int
) -> None:
    """Random arrivals, chunks, aborts, shared prefixes, and a pool that holds two or three of twelve requests."""
    rng = random.Random(seed)
    cache: PagedCache = kind(28, 4)
    loop = continuous(
        small, TokenBudget(8, 16), cache=cache, max_running=6, policy=LongestPrefixFirst() if seed else None
    ).core
    requests = random_requests(rng, 12)
    delivered = play(loop, requests, rng)
    assert loop.scheduler.running_set.num_preemptions > 0
    if isinstance(cache, PrefixCache):
        assert cache.counts.hit_tokens > 0
    for request in requests:
        assert delivered[request.id] == request.output_tokens
        assert request.output_tokens == alone(oracle, request.prompt_tokens, request.output_tokens)
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_tokens) == request.params.max_tokens
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH, FinishReason.ABORT}
    assert cache.usage.referenced == 0


@pytest.mark.proof
def test_the_bundled_model_answers_as_it_does_in_the_engine_of_phase_2(chatty: Model) -> None:
    """In a pool so small that requests are preempted, with chunks of eight tokens and shared prefixes."""
    assert chatty.tokenizer is not None
    chats = [chatty.tokenizer.chat([{"role": "user", "content": question}]) for question in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=20)
    wanted = [(answer.output_tokens, answer.text) for answer in static(chatty).generate(chats, params)]
    engine = continuous(chatty, TokenBudget(8, 12), cache=PrefixCache(16, 4))
    found = [(answer.output_tokens, answer.text) for answer in engine.generate(chats, params)]
    assert found == wanted
    assert engine.core.scheduler.running_set.num_preemptions > 0


def test_a_penalty_counts_the_token_in_flight(small: Model) -> None:
    """It is larger than the differences between the logits of this model, so no token comes twice."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=2)
    (answer,) = continuous(small).generate([[5, 6, 7]], params)
    assert len({*answer.output_tokens}) == 30


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", PagedCache), ("bfloat16", PagedCache), ("bfloat16", PrefixCache)]
)
def test_a_request_draws_the_same_tokens_alone_and_in_any_batch(dtype: str, kind: type[PagedCache]) -> None:
    """In chunks of any size, with a prefix found in the cache, and computed again after a preemption."""
    rng, chatty = random.Random(4), Model.load(device="cpu", dtype=dtype)
    params = [
        SamplingParams(temperature=rng.choice([0, 1.2]), top_p=0.9, max_tokens=24, seed=n, ignore_eos=True)
        for n in range(len(PROMPTS))
    ]
    alone = [continuous(chatty).generate([prompt], one) for prompt, one in zip(PROMPTS, params, strict=True)]
    wanted = [answer.output_tokens for (answer,) in alone]
    for _ in range(2):
        chunk = rng.randint(1, 12)
        engine = continuous(chatty, TokenBudget(chunk, chunk + rng.randint(0, 12)), cache=kind(14, 4))
        answers = engine.generate(PROMPTS * 2, params * 2)
        assert [answer.output_tokens for answer in answers] == wanted * 2
        assert engine.core.scheduler.running_set.num_preemptions > 0


def test_a_step_that_raises_is_planned_again(small: Model, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(32, 4)
    loop = continuous(small, TokenBudget(8, 16), cache=cache).core
    requests = random_requests(random.Random(9), 4)
    for request in requests:
        loop.submit(request)
    launch, calls, lost = loop.runner.launch, itertools.count(), 0

    def shaky(step: PackedStep) -> Launched:
        if next(calls) % 3 == 1:
            raise RuntimeError("the device is lost")
        return launch(step)

    monkeypatch.setattr(loop.runner, "launch", shaky)
    while loop.has_work:
        try:
            loop.step()
        except RuntimeError:
            lost += 1
            assert lost < 100, "no step is computed any more"
        check(loop.scheduler)
    assert lost > 5
    for request in requests:
        assert len(request.output_tokens) == request.params.max_tokens
        assert request.output_tokens == alone(oracle, request.prompt_tokens, request.output_tokens)
    assert cache.usage.referenced == 0


class NoWaiting(TorchDispatchMode):
    """Refuses operators for which the host waits on a GPU, to know their result before it goes on."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"), name
        assert name != "index" or all(index is None or index.dtype != torch.bool for index in args[1]), (
            "a mask as index"
        )
        return function(*args, **(kwargs or {}))


def test_packing_and_launching_never_wait_for_the_device(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only reading a step's output waits, for its own event; penalties and masks read that of the step before."""
    loop = continuous(small, TokenBudget(8, 16), cache=PrefixCache(32, 4), max_running=4).core
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
        {"logit_bias": {3: 1.0}, "min_tokens": 4},
        {"logprobs": 2, "prompt_logprobs": 1},
    ]
    for number, one in enumerate(params):
        loop.submit(
            Request(f"r{number}", tuple(range(3, 15 + number)), SamplingParams(max_tokens=8, seed=number, **one))
        )

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the host waits for the device")

    def unwaiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            with NoWaiting(), pytest.MonkeyPatch.context() as patch:
                for name in ("tolist", "numpy", "cpu", "item"):
                    patch.setattr(torch.Tensor, name, refused)
                return function(*args)

        return checked

    for name in ("pack", "launch"):
        monkeypatch.setattr(loop.runner, name, unwaiting(getattr(loop.runner, name)))
    tokens = sum(event.token is not None for step in loop.run() for event in step.events)
    assert tokens >= 8
