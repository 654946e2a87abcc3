import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request import Batch, Request, SamplingParams
from phase3_chunked_prefill.budget import StepBudget, TokenBudget, cut
from phase3_chunked_prefill.chunker import Chunker, Running


def request(name: str, prompt: int, max_tokens: int = 4, computed: int = 0) -> Request:
    """A running request; with `computed == prompt` it has one output token, and so is a decode."""
    one = Request(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    one.admit(0)
    if computed:
        one.advance(0, computed)
        if computed == prompt:
            one.append(7, 0)
    return one


def lengths(batch: Batch) -> dict[str, int]:
    """The tokens of each request in a step."""
    return {piece.request.id: piece.length for piece in batch}


def run(batch: Batch, now: float) -> None:
    """Commit a step as an engine does. Every sampled token is a 9."""
    for piece in batch:
        one, completes = piece.request, piece.completes
        one.advance(piece.start, piece.length)
        if completes and len(one.output_tokens) < one.params.max_tokens:
            one.append(9, now)


def unfinished(requests: Sequence[Request]) -> list[Request]:
    return [one for one in requests if len(one.output_tokens) < one.params.max_tokens]


# The cut.


@pytest.mark.parametrize(
    ("start", "pending", "room", "page_size", "length"),
    [
        (0, 40, 100, 16, 40),  # fits
        (0, 40, 40, 16, 40),  # just fits: a slice that completes its request is not cut
        (0, 40, 39, 16, 32),  # down to a boundary
        (0, 40, 32, 16, 32),  # on the boundary already
        (0, 40, 15, 16, 15),  # no boundary within reach
        (16, 40, 15, 16, 15),
        (15, 40, 15, 16, 1),  # to the first boundary
        (15, 40, 17, 16, 17),
        (15, 40, 18, 16, 17),
        (5, 40, 7, 1, 7),
        (0, 40, 0, 16, 0),
        (3, 1, 0, 16, 0),
    ],
)
def test_a_chunk_ends_at_a_page_boundary(start: int, pending: int, room: int, page_size: int, length: int) -> None:
    found = cut(start, pending, room, page_size)
    assert found == length, f"{pending} tokens from position {start}, room for {room}, pages of {page_size}"


@given(
    start=st.integers(0, 300),
    pending=st.integers(1, 300),
    room=st.integers(0, 300),
    page_size=st.sampled_from([1, 3, 16, 64]),
)
def test_a_cut_wastes_less_than_a_page_and_never_all_of_it(start: int, pending: int, room: int, page_size: int) -> None:
    length = cut(start, pending, room, page_size)
    most = min(pending, room)
    assert most - page_size < length <= most, "a cut costs less than a page"
    assert (length > 0) == (room > 0), "a step with room computes something"
    if length < most:
        assert (start + length) % page_size == 0, "a chunk shorter than its room ends at a page boundary"


# The budget of a step.


@pytest.mark.parametrize(
    ("decodes", "pending", "wanted"),  # wanted: decodes that fit, tokens left for prompts, of those for short prompts
    [
        (0, [], (0, 64, 0)),
        (10, [], (10, 54, 0)),
        (70, [], (64, 0, 0)),  # without prompts all tokens may go to decodes
        (70, [30], (56, 8, 4)),  # an eighth is left to prompts
        (50, [30], (50, 14, 7)),
        (10, [30, 100], (10, 54, 27)),  # up to half for short prompts
        (10, [5, 100, 6], (10, 54, 11)),  # no more than they can use
        (10, [32, 33], (10, 54, 27)),  # a prompt of a whole chunk is short
        (10, [100, 200], (10, 54, 0)),
    ],
)
def test_a_step_is_split_between_decodes_and_prompts(
    decodes: int, pending: list[int], wanted: tuple[int, int, int]
) -> None:
    budget = StepBudget.of_step(TokenBudget(32, 64), 16, decodes, pending)
    found = budget.decodes, budget.left, budget.reserved_for_short
    assert found == wanted, f"(decodes, left, reserved_for_short) of {decodes} decodes and prompts of {pending} tokens"


def test_prompts_take_their_tokens_from_the_budget_in_order() -> None:
    budget = StepBudget.of_step(TokenBudget(64, 100), 16, 10, [1000, 20, 64, 65])
    assert (budget.left, budget.reserved_for_short) == (90, 45)
    found = []
    for start, pending in ((0, 1000), (0, 20), (7, 64), (0, 65)):
        length = budget.fit(start, pending)
        found.append(length)
        budget.consume(pending, length)
        long = [pending for pending in (1000, 65, 64) if budget.is_long(pending)]
        assert long == [1000, 65], "a prompt is long if it needs more than one chunk of 64"
    assert found == [32, 20, 25, 13], "long, down to a page; short, whole; short, cut at a page; the rest"
    assert (budget.left, budget.reserved_for_short) == (0, 0)


@pytest.mark.parametrize(
    ("left", "reserved", "start", "pending", "length"),
    [
        (40, 10, 0, 1000, 30),  # a long prompt leaves what is reserved for short ones
        (40, 10, 0, 50, 40),  # a short one may have all that is left
        (40, -5, 0, 1000, 40),  # short ones have taken more than was reserved for them: nothing is left of that
        (100, 10, 0, 1000, 64),  # but never more than a chunk
        (10, 10, 0, 1000, 0),
        (0, 0, 0, 5, 0),
        (0, -5, 0, 1000, 0),
    ],
)
def test_a_prompt_gets_what_fits(left: int, reserved: int, start: int, pending: int, length: int) -> None:
    budget = StepBudget(TokenBudget(64, 200), 1, decodes=0, left=left, reserved_for_short=reserved)
    found = budget.fit(start, pending)
    assert found == length, f"a prompt of {pending} tokens; {left} are left, {reserved} of them for short prompts"
    assert (budget.left, budget.reserved_for_short) == (left, reserved), "fit takes nothing; consume does"
    fits = left > 0 and left > reserved
    assert budget.fits_long == fits, "a long prompt can have a token if some is left, and not all of it is reserved"


# One step.


@pytest.mark.proof
def test_decodes_come_first_then_prompts_in_order_with_the_last_cut_to_fit() -> None:
    chunker = Chunker(TokenBudget(max_chunk_size=64, max_batched_tokens=100), page_size=16)
    running = [
        request("prompt", 50),
        request("decode", 9, computed=9),
        request("half", 60, computed=20),
        request("last", 30),
        request("none", 30),
    ]
    found = [(piece.request.id, piece.start, piece.length) for piece in chunker.plan(running)]
    wanted = [("decode", 9, 1), ("prompt", 0, 50), ("half", 20, 40), ("last", 0, 9)]
    assert found == wanted, f"(request, start, length) of a step of 100 tokens in chunks of 64: {found}"


def test_sequences_with_tokens_in_flight_are_planned_behind_those() -> None:
    """A sequence says what is scheduled; the request knows only what is computed. What is in flight is not planned."""
    chunker = Chunker(TokenBudget(64, 100))
    decode, prompt, nothing = (request(name, 9, computed=5) for name in ("decode", "prompt", "nothing"))
    step = chunker.schedule([Running(prompt, 9, 7), Running(nothing, 9, 9), Running(decode, 10, 9)])
    found = [(piece.request.id, piece.start, piece.length) for piece in step.slices]
    assert found == [("decode", 9, 1), ("prompt", 7, 2)], "slices begin at num_scheduled and end at num_tokens"
    assert [one.request.id for one in step.sequences] == ["decode", "prompt"], "the sequence of each slice"
    assert step.budget.left == 100 - 1 - 2, "what is left of the step's budget"


def test_the_budget_is_split_with_waiting_requests_in_mind() -> None:
    chunker = Chunker(TokenBudget(64, 64))
    long = [Running(request("long", 1000), 1000, 0)]
    assert [piece.length for piece in chunker.schedule(long, waiting=[20]).slices] == [44], "20 for a request to come"
    decodes = [Running(request(f"d{n}", 1), 1, 0) for n in range(70)]
    step = chunker.schedule(decodes, waiting=iter([30]))
    assert (len(step.slices), step.budget.left) == (56, 8), "decodes leave prompt_floor to a request to come"


def test_only_sequences_with_slots_for_their_tokens_are_scheduled() -> None:
    asked: list[list[str]] = []

    def allocate_slots(sequences: Sequence[Running]) -> list[Running]:
        asked.append([one.request.id for one in sequences])
        return [one for one in sequences if one.request.id not in ("d1", "p0")]

    chunker = Chunker(TokenBudget(6, 12))
    running = [Running(request("p0", 9), 9, 0), *(Running(request(f"d{n}", 1), 1, 0) for n in range(13))]
    running.append(Running(request("p1", 9), 9, 0))
    step = chunker.schedule(running, allocate_slots=allocate_slots)
    assert asked == [[*(f"d{n}" for n in range(11)), "p0", "p1"]], "the decodes that run, then all prompts, at once"
    found = [(piece.request.id, piece.length) for piece in step.slices]
    assert found == [("d0", 1), *((f"d{n}", 1) for n in range(2, 11)), ("p1", 1)], "without d1 and p0"
    assert [one.request.id for one in step.sequences] == [name for name, _ in found]


def test_a_long_prompt_gets_at_most_one_chunk() -> None:
    chunker = Chunker(TokenBudget(64, 200), page_size=16)
    assert lengths(chunker.plan([request("long", 1000)])) == {"long": 64}
    assert lengths(chunker.plan([request("a", 1000), request("b", 1000)])) == {"a": 64, "b": 64}


def test_the_first_of_two_long_prompts_is_not_slowed_by_the_second() -> None:
    chunker = Chunker(TokenBudget(64, 64), page_size=16)
    assert lengths(chunker.plan([request("a", 1000), request("b", 1000)])) == {"a": 64}


def test_tokens_are_reserved_for_short_prompts_up_to_half_of_the_step() -> None:
    chunker = Chunker(TokenBudget(64, 64))
    long = request("long", 1000)
    assert lengths(chunker.plan([long, request("s", 5)])) == {"long": 59, "s": 5}
    assert lengths(chunker.plan([long, request("s", 60)])) == {"long": 32, "s": 32}
    assert lengths(chunker.plan([long, request("s", 64)])) == {"long": 32, "s": 32}  # a whole chunk is short
    assert lengths(chunker.plan([long, *(request(f"s{n}", 20) for n in range(3))])) == {"long": 32, "s0": 20, "s1": 12}
    # Short prompts at the front get the reserved tokens and what the long ones leave, not the other half.
    assert lengths(chunker.plan([request("s", 20), long, request("t", 20)])) == {"s": 20, "long": 32, "t": 12}


def test_the_reserve_is_half_of_what_decodes_leave() -> None:
    chunker = Chunker(TokenBudget(64, 64))
    decodes = [request(f"d{n}", 3, computed=3) for n in range(24)]
    found = lengths(chunker.plan([*decodes, request("long", 1000), request("s", 50)]))
    assert (found["long"], found["s"], len(found)) == (20, 20, 26)
    few = Chunker(TokenBudget(4, 8))  # half of a single token is none: the first prompt gets it
    found = lengths(few.plan([*decodes, request("long", 1000), request("s", 4)]))
    assert (found["long"], "s" in found, len(found)) == (1, False, 8)


def test_decodes_leave_the_prompt_floor_only_while_there_are_prompts() -> None:
    chunker = Chunker(TokenBudget(32, 64))
    decodes = [request(f"d{n}", 3, computed=3) for n in range(70)]
    assert len(chunker.plan(decodes)) == 64
    assert chunker.budget.prompt_floor == 8
    found = lengths(chunker.plan([*decodes, request("p", 30)]))
    assert (len(found), found["p"]) == (56 + 1, 8)
    tiny = Chunker(TokenBudget(1, 2))
    assert lengths(tiny.plan([*decodes, request("p", 30), request("q", 30)])) == {"d0": 1, "p": 1}


def test_decodes_rotate_when_they_exceed_the_budget() -> None:
    chunker = Chunker(TokenBudget(4, 4))
    decodes = [request(f"d{n}", 3, max_tokens=99, computed=3) for n in range(10)]
    seen = []
    for step in range(5):
        batch = chunker.plan(decodes)
        seen.append([int(piece.request.id[1:]) for piece in batch])
        run(batch, step)
    # Within a step in the order of the requests. The longest waiting ones run, the first of them on a tie.
    wanted = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9], [2, 3, 4, 5], [0, 1, 6, 7]]
    assert seen == wanted, "which of 10 decodes run in each of 5 steps with room for 4"


def rotated(chunker: Chunker, numbers: list[int], decodes: dict[int, Running], room: int) -> list[int]:
    """The numbers of the decodes that run, out of these."""
    chosen = chunker.rotate_decodes([decodes.setdefault(n, Running(request(f"d{n}", 1), 1, 0)) for n in numbers], room)
    return [int(decode.request.id[1:]) for decode in chosen]


def test_rotation_restarts_once_all_decodes_fit() -> None:
    chunker, decodes = Chunker(TokenBudget(1, 8)), dict[int, Running]()
    steps = [rotated(chunker, numbers, decodes, 2) for numbers in ([0, 1, 2], [1, 2], [0, 1, 2])]
    assert steps == [[0, 1], [1, 2], [0, 1]], "no decode was skipped in the second step: the third begins anew"


@given(data=st.data(), room=st.integers(1, 6))
def test_no_decode_waits_longer_than_one_rotation_while_others_start_and_end(data: st.DataObject, room: int) -> None:
    chunker, known = Chunker(TokenBudget(1, 8)), dict[int, Running]()
    decodes = list(range(data.draw(st.integers(1, 12))))
    waits: dict[int, tuple[int, int]] = {}  # steps missed, and how many decodes there were at the first
    for step in range(30):
        ran = rotated(chunker, decodes, known, room)
        assert len(ran) == min(room, len(decodes))
        assert ran == [d for d in decodes if d in set(ran)]
        for d in decodes:
            missed, there = waits.pop(d, (0, len(decodes)))
            if d not in ran:
                waits[d] = missed + 1, there
                rotation = -(-there // room)
                assert missed + 1 < rotation, f"a decode of {there}, with room for {room}, missed {missed + 1} steps"
        for gone in data.draw(st.lists(st.sampled_from(decodes), max_size=2, unique=True)):
            decodes.remove(gone)
            waits.pop(gone, None)
        decodes += [1000 + 10 * step + n for n in range(data.draw(st.integers(0, 2)))]
        if not decodes:
            decodes.append(5000 + step)


# Many steps, over any requests.


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


def test_a_short_prompt_is_computed_behind_ten_long_ones() -> None:
    chunker = Chunker(TokenBudget(64, 64), page_size=16)
    running = [request(f"long{n}", 1000, max_tokens=1) for n in range(10)]
    short = request("short", 60, max_tokens=1)
    running.append(short)
    for step in range(2):
        assert not short.output_tokens
        run(chunker.plan(running), step)
    assert short.output_tokens == [9]


def test_decodes_run_in_every_step_under_steady_arrivals() -> None:
    chunker = Chunker(TokenBudget(64, 64), page_size=16)
    running = [request(f"d{n}", 3, max_tokens=1000, computed=3) for n in range(8)]
    for step in range(50):
        running.append(request(f"p{step}", 200, max_tokens=1000))
        batch = chunker.plan(running)
        assert all(lengths(batch)[f"d{n}"] == 1 for n in range(8))
        assert batch.num_prefill_tokens >= 64 - batch.num_decode_tokens - 16
        run(batch, step)


# Refusals.


@pytest.mark.parametrize(
    ("chunk", "batched", "message"),
    [
        (0, 64, "max_chunk_size must be an integer from 1, got 0"),
        (True, 64, "max_chunk_size must be an integer from 1, got True"),
        (1, 0, "max_batched_tokens must be an integer from 1, got 0"),
        (1, 2.5, "max_batched_tokens must be an integer from 1, got 2.5"),
        (1, 1, "max_batched_tokens must be at least 2, a decode and a token of a prompt; got 1"),
        (65, 64, r"max_chunk_size must be at most max_batched_tokens \(64\), got 65"),
    ],
)
def test_bad_budgets_are_refused(chunk: int, batched: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudget(chunk, batched)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_bad_page_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="page_size must be an integer from 1"):
        Chunker(TokenBudget(), size)
