"""Many steps in a row, over any requests: nothing is computed twice, and no request starves."""

import random
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request import Batch, Request
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from tests.phase3_chunked_prefill.support import lengths, request, run, unfinished


@st.composite
def chunkers(draw: st.DrawFn) -> Chunker:
    batched = draw(st.integers(2, 80))
    budget = TokenBudget(draw(st.integers(1, batched)), batched)
    return Chunker(budget, draw(st.sampled_from([1, 4, 16])))


def steps(chunker: Chunker, running: Sequence[Request], limit: int = 4000) -> Iterator[Batch]:
    """Plan and run steps until all requests have ended. Ended requests are planned no more."""
    for step in range(limit):
        todo = unfinished(running)
        if not todo:
            return
        batch = chunker.plan(todo)
        assert len(batch)
        yield batch
        run(batch, step)
    raise AssertionError(f"not done after {limit} steps")


@settings(max_examples=60)
@given(chunker=chunkers(), prompts=st.lists(st.integers(1, 150), min_size=1, max_size=12))
def test_no_step_is_over_budget_and_no_token_is_computed_twice_or_skipped(chunker: Chunker, prompts: list[int]) -> None:
    requests = [request(f"r{n}", prompt, max_tokens=1 + n % 5) for n, prompt in enumerate(prompts)]
    computed: dict[str, list[int]] = {one.id: [] for one in requests}
    for batch in steps(chunker, requests):
        assert batch.num_tokens <= chunker.budget.max_batched_tokens, "a step is over its budget"
        assert max(piece.length for piece in batch) <= chunker.budget.max_chunk_size, "a slice is longer than a chunk"
        assert len({piece.request.id for piece in batch}) == len(batch), "a request has two slices in a step"
        for piece in batch:
            computed[piece.request.id] += range(piece.start, piece.stop)
            assert piece.completes or piece.length < piece.request.total - piece.request.computed
    for one in requests:
        assert computed[one.id] == list(range(one.total - 1)), f"{one.id}: a token is computed twice, or skipped"
        assert len(one.output_tokens) == one.params.max_tokens


@settings(max_examples=60)
@given(chunker=chunkers(), prompts=st.lists(st.integers(1, 300), min_size=1, max_size=20), ready=st.integers(0, 30))
def test_decodes_and_prompts_both_advance_in_every_step(chunker: Chunker, prompts: list[int], ready: int) -> None:
    budget = chunker.budget
    requests = [request(f"d{n}", 3, max_tokens=20, computed=3) for n in range(ready)]
    requests += [request(f"r{n}", prompt, max_tokens=5) for n, prompt in enumerate(prompts)]
    for batch in steps(chunker, requests):
        found = lengths(batch)
        pending = {one.id: one.total - one.computed for one in unfinished(requests)}
        decodes = [name for name, n in pending.items() if n == 1]
        prompts_left = {name: n for name, n in pending.items() if n > 1}
        short = [name for name, n in prompts_left.items() if n <= budget.max_chunk_size]
        ran = [name for name in decodes if name in found]
        floor = budget.prompt_floor if prompts_left else 0
        assert len(ran) == min(len(decodes), budget.max_batched_tokens - floor), "the decodes of a step"
        assert not prompts_left or next(iter(prompts_left)) in found, "the first prompt has no token in a step"
        one_left = budget.max_batched_tokens - len(ran) == 1
        assert not short or short[0] in found or one_left, "the first short prompt has no token in a step"
        # The unused budget is less than a page for each prompt that was cut, unless no request could use it.
        used = sum(found.values())
        wanted = len(decodes) + sum(min(pending[name], budget.max_chunk_size) for name in prompts_left)
        cut_off = chunker.page_size * max(len(prompts_left), 1)
        assert used > min(budget.max_batched_tokens, wanted) - cut_off, "tokens of a step are left unused"


def test_a_long_prompt_starts_and_ends_under_a_steady_stream_of_short_ones() -> None:
    """Four new short prompts a step, more than a step can hold: half of every step is the long one's."""
    chunker = Chunker(TokenBudget(64, 128), page_size=16)
    long, rng = request("long", 4096, max_tokens=1), random.Random(0)
    running: list[Request] = [long]
    for step in range(4096 // 64):
        running += [request(f"s{step}-{n}", rng.randint(30, 60), max_tokens=1) for n in range(4)]
        batch = chunker.plan(running)
        assert lengths(batch)["long"] == 64
        assert batch.num_tokens > 128 - 2 * 16
        run(batch, step)
        running = unfinished(running)
    assert long.output_tokens == [9]
