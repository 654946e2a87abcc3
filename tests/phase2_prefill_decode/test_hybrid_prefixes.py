"""Models with states have transformers' tokens also when their prompts are found in a prefix cache with checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.extras.families.delta_rule import Tokens, delta_rule
from phase2_prefill_decode.extras.families.recurrent import copy_inputs
from phase2_prefill_decode.extras.families.stateful import StateTensor
from phase2_prefill_decode.extras.families.states import Cuts, LayerState, StatefulRunner
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.extras.invariants import Checks
from phase6_integration.engine.isolation import IsolatingCore, IsolatingRunner, LoadShedding
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.steps import CPU, loaded
from tests.phase2_prefill_decode.test_hybrids import ANSWER, GREEDY, VARIANTS, alike, in_order, poison, runner_of
from tests.phase2_prefill_decode.test_identity import follows, prompts

Pair = tuple[Any, Model]


@pytest.fixture(params=["lfm2-biases", "qwen3.5"], scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers, and the same one here."""
    family, options = VARIANTS[request.param]
    oracle = tiny_model(family, **options)
    directory: Path = saved(oracle, tmp_path_factory.mktemp(request.param))
    return oracle, Model.load(directory, device="cpu", dtype="float32")


def checked(
    oracle: Any, core: Any, runner: StatefulRunner, prompts: Sequence[Sequence[int]], wave: int
) -> list[Request]:
    """Serve prompts together. Rows that no request has are poisoned before each step, and all is checked after it."""
    requests = [Request(f"{wave}.{number}", tuple(prompt), GREEDY) for number, prompt in enumerate(prompts)]
    for request in requests:
        core.submit(request)
    while core.has_work:
        poison(runner)
        core.step()
    for request in requests:
        assert len(request.output_tokens) == ANSWER
        assert follows(oracle, list(request.prompt_tokens), list(request.output_tokens))
    return requests


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("pages", "slots"), [(128, 16), (64, 2), (18, 4)])
def test_a_chat_has_the_tokens_of_transformers(pair: Pair, pages: int, slots: int, ahead: int) -> None:
    """Three turns of four chats that begin alike, in chunks of 13 tokens; slots, or pages, are too few for all."""
    oracle, model = pair
    cache = CheckpointedPrefixCache(slots, pages, 8)
    engine = continuous(model, TokenBudget(13), cache=cache, ahead=ahead)
    core, scheduler = engine.core, engine.core.scheduler
    core.observers.append(Checks(scheduler))
    given, draw = alike(model), Random(1)
    for turn in range(3):
        hits = cache.counts.hit_tokens
        requests = checked(oracle, core, runner_of(engine), given, turn)
        if turn and slots == 16:  # all that was said, but the new 5 tokens and the last one, which was never computed
            assert cache.counts.hit_tokens - hits == sum((len(prompt) - 6) // 8 * 8 for prompt in given)
        given = [[*r.prompt_tokens, *r.output_tokens, *draw.choices(range(3, 300), k=5)] for r in requests]
    assert cache.counts.hit_tokens
    assert pages >= 64 or scheduler.running_set.num_preemptions
    if slots == 16:
        assert cache.cached_tokens(Request("salted", tuple(given[0]), cache_salt="another tenant")) == 0


def test_requests_that_come_together_compute_a_common_prefix_once(pair: Pair) -> None:
    """The first has its state copied where the others part from it: they wait for that."""
    oracle, model = pair
    cache = CheckpointedPrefixCache(16, 64, 8)
    engine = continuous(model, TokenBudget(256), cache=cache)
    given = alike(model)[::-1]  # the longest first: its own end is elsewhere
    checked(oracle, engine.core, runner_of(engine), given, 0)
    assert cache.counts.hit_tokens == (len(given) - 1) * 32, "of 33 tokens in common"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failed_step_is_repeated_from_a_checkpoint(pair: Pair, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh step with several slices fails between two layers. What it wrote to slots is found by nobody."""
    oracle, model = pair
    cache = CheckpointedPrefixCache(6, 64, 8)
    engine = continuous(model, TokenBudget(32), cache=cache, ahead=ahead)
    runner, scheduler, count = runner_of(engine), engine.core.scheduler, 0

    class Failing:
        def pack(self, batch: Batch) -> Any:
            return runner.pack(batch)

        def launch(self, step: Any) -> Any:
            nonlocal count
            count += step.slices > 1
            if step.slices == 1 or count % 7:
                return runner.launch(step)
            with monkeypatch.context() as patch:
                patch.setattr(runner.decoder, "layers", [*model.decoder.layers[:-1], None])
                return runner.launch(step)

    core = IsolatingCore(scheduler, IsolatingRunner(Failing(), LoadShedding(scheduler)))
    core.observers.append(Checks(scheduler))
    given = alike(model)
    for turn in range(3):
        checked(oracle, core, runner, given, turn)
    assert count > 20
    assert cache.counts.hit_tokens >= 6 * 32


def test_a_state_is_computed_again_if_its_checkpoint_has_gone(pair: Pair) -> None:
    """Between a request's admission and its first slice."""
    oracle, model = pair
    cache = CheckpointedPrefixCache(8, 64, 8)
    engine = continuous(model, TokenBudget(16), cache=cache)
    given, runner = alike(model)[-1:], runner_of(engine)
    pack = runner.pack
    checked(oracle, engine.core, runner, given, 0)

    def losing(batch: Batch) -> Any:
        if batch.slices[0].start == 56:  # of 63 tokens: its first slice
            cache.checkpoints.removed([cache.table(batch.slices[0].request)[6]])
        return pack(batch)

    runner.pack = losing  # type: ignore[method-assign]
    (request,) = checked(oracle, engine.core, runner, given, 1)
    assert cache.counts.hit_tokens == 56
    assert cache.checkpoints.usable(cache.match(request).pages)


def test_a_row_that_has_another_request_s_state_at_the_same_place_is_not_believed(pair: Pair) -> None:
    """The next turn gets the row of the last. The state there ends with the cached prefix; the id is the same."""
    oracle, model = pair
    engine = continuous(model, TokenBudget(64), cache=CheckpointedPrefixCache(8, 64, 8))
    (prompt,) = prompts(model.config.vocab_size, [57 - ANSWER])
    (first,) = checked(oracle, engine.core, runner_of(engine), [prompt], 0)
    (then,) = checked(oracle, engine.core, runner_of(engine), [[*prompt, *first.output_tokens, 5]], 0)
    assert (first.computed, then.id) == (56, first.id)
    assert engine.core.scheduler.cache.counts.hit_tokens == 56


def test_an_aborted_request_leaves_what_it_has_computed(pair: Pair) -> None:
    oracle, model = pair
    cache = CheckpointedPrefixCache(8, 64, 8)
    engine = continuous(model, TokenBudget(16), cache=cache, ahead=1)
    core, runner = engine.core, runner_of(engine)
    core.observers.append(Checks(core.scheduler))
    (prompt,) = alike(model)[-1:]
    request = Request("aborted", tuple(prompt), GREEDY)
    core.submit(request)
    for _ in range(2):
        core.step()
    core.abort(request)
    while core.has_work:
        core.step()
    assert cache.cached_tokens(Request("again", tuple(prompt))) == 32
    checked(oracle, core, runner, [prompt], 1)
    assert cache.counts.hit_tokens == 32
    cache.reset()
    checked(oracle, core, runner, [prompt], 2)
    assert cache.counts.hit_tokens == 32, "and after a reset nothing is found"


Sizes = list[tuple[int, int, list[int]]]
cut_sequences = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 150)).flatmap(
        lambda size: st.tuples(*map(st.just, size), st.lists(st.integers(1, max(size[1] - 1, 1)), max_size=3))
    ),
    min_size=1,
    max_size=4,
)


def cut_step(sizes: Sizes, cache: PagedCache) -> tuple[StepTensors, list[tuple[int, int, int]]]:
    """A step of sequences of old and new tokens, with cuts in the new ones: sequence, new tokens before it, slot."""
    batch, places = list[Slice](), list[tuple[int, int, int]]()
    for number, (old, new, cuts) in enumerate(sizes):
        request = Request(f"{number}", (0,) * (old + new))
        cache.attach(request)
        cache.grow(request, old + new)
        batch.append(Slice(request, old, new))
        places += [(number, cut, 0) for cut in sorted({*cuts}) if cut < new]
    places = [(number, cut, slot) for slot, (number, cut, _) in enumerate(places)]
    step = loaded(Batch(tuple(batch)), cache)
    if places:
        step.metadata.plans[Cuts] = Cuts(places, *torch.tensor(places).T)
    return step, places


@given(cut_sequences, st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_a_convolution_s_state_at_a_cut_is_the_last_inputs_before_it(sizes: Sizes, taps: int) -> None:
    step, places = cut_step(sizes, PagedCache(512, 16))
    draw, kept = torch.Generator().manual_seed(taps), taps - 1
    state = LayerState([StateTensor((kept, 3), "float32")], CPU, len(places))
    state.reserve(len(sizes))
    whole = [torch.randn(old + new, 3, generator=draw) for old, new, _ in sizes]
    padded = [torch.cat((torch.zeros(kept, 3), each)) for each in whole]
    for number, (old, _, _) in enumerate(sizes):
        state.tensors[0][number] = padded[number][old : old + kept] if old else torch.nan
    copy_inputs(torch.cat([each[old:] for each, (old, *_) in zip(whole, sizes, strict=True)]), state, step)
    for number, cut, slot in places:
        end = sizes[number][0] + cut
        assert torch.equal(state.checkpoints[0][slot], padded[number][end : end + kept])


@given(cut_sequences, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_delta_rule_s_state_at_a_cut_is_transformers_after_the_tokens_before_it(sizes: Sizes, seed: int) -> None:
    step, places = cut_step(sizes, PagedCache(512, 16))
    draw, heads, whole = torch.Generator().manual_seed(seed), 2, list[Tokens]()
    states = torch.full((len(sizes), heads, 4, 5), torch.nan)
    for number, (old, new, _) in enumerate(sizes):
        shape = old + new, heads
        q, k = (torch.randn(*shape, 4, generator=draw) for _ in range(2))
        v, g = torch.randn(*shape, 5, generator=draw), -3 * torch.rand(shape, generator=draw)
        whole.append(Tokens(q, k / k.norm(dim=-1, keepdim=True), v, g, torch.rand(shape, generator=draw)))
        if old:
            states[number] = state_after(whole[-1], old)
    new_tokens = Tokens(
        *(
            torch.cat([each[old:] for each, (old, *_) in zip(side, sizes, strict=True)])
            for side in zip(*whole, strict=True)
        )
    )
    kept = torch.full((len(places), heads, 4, 5), torch.nan)
    delta_rule(new_tokens, states, step, kept)
    for number, cut, slot in places:
        wanted = state_after(whole[number], sizes[number][0] + cut)
        torch.testing.assert_close(kept[slot], wanted, rtol=1e-4, atol=1e-4)
    for number, (old, new, _) in enumerate(sizes):
        torch.testing.assert_close(states[number], state_after(whole[number], old + new), rtol=1e-4, atol=1e-4)


def state_after(tokens: Tokens, count: int) -> Tensor:
    return in_order(Tokens(*(each[:count][None] for each in tokens)))[1][0]
