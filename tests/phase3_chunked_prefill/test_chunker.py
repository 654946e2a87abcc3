from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase0_request.queue import SequenceState
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from tests.phase3_chunked_prefill.support import lengths, request, run


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
    sequences = [SequenceState(prompt), SequenceState(nothing), SequenceState(decode)]
    for sequence, (tokens, scheduled) in zip(sequences, ((9, 7), (9, 9), (10, 9)), strict=True):
        sequence.num_tokens, sequence.num_scheduled = tokens, scheduled
    step = chunker.schedule(sequences)
    found = [(piece.request.id, piece.start, piece.length) for piece in step.slices]
    assert found == [("decode", 9, 1), ("prompt", 7, 2)], "slices begin at num_scheduled and end at num_tokens"
    assert [one.request.id for one in step.sequences] == ["decode", "prompt"], "the sequence of each slice"
    assert step.left == 100 - 1 - 2, "what is left of the step's budget"


def test_the_budget_is_split_with_waiting_requests_in_mind() -> None:
    chunker = Chunker(TokenBudget(64, 64))
    long = [SequenceState(request("long", 1000))]
    assert [piece.length for piece in chunker.schedule(long, waiting=[20]).slices] == [44], "20 for a request to come"
    decodes = [SequenceState(request(f"d{n}", 1)) for n in range(70)]
    step = chunker.schedule(decodes, waiting=iter([30]))
    assert (len(step.slices), step.left) == (56, 8), "decodes leave prompt_floor to a request to come"


def test_only_sequences_with_slots_for_their_tokens_are_scheduled() -> None:
    asked: list[list[str]] = []

    def allocate_slots(sequences: Sequence[SequenceState]) -> list[SequenceState]:
        asked.append([one.request.id for one in sequences])
        return [one for one in sequences if one.request.id not in ("d1", "p0")]

    chunker = Chunker(TokenBudget(6, 12))
    running = [SequenceState(request("p0", 9)), *(SequenceState(request(f"d{n}", 1)) for n in range(13))]
    running.append(SequenceState(request("p1", 9)))
    step = chunker.schedule(running, allocate_slots=allocate_slots)
    assert asked == [[*(f"d{n}" for n in range(11)), "p0", "p1"]], "the decodes that run, then all prompts, at once"
    found = [(piece.request.id, piece.length) for piece in step.slices]
    assert found == [("d0", 1), *((f"d{n}", 1) for n in range(2, 11)), ("p1", 1)], "without d1 and p0"
    assert [one.request.id for one in step.sequences] == [name for name, _ in found]


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


def rotated(chunker: Chunker, numbers: list[int], decodes: dict[int, SequenceState], room: int) -> list[int]:
    """The numbers of the decodes that run, out of these."""
    for n in numbers:
        if n not in decodes:
            decodes[n] = SequenceState(request(f"d{n}", 1))
    chosen = chunker.rotate_decodes([decodes[n] for n in numbers], room)
    return [int(decode.request.id[1:]) for decode in chosen]


def test_rotation_restarts_once_all_decodes_fit() -> None:
    chunker, decodes = Chunker(TokenBudget(1, 8)), dict[int, SequenceState]()
    steps = [rotated(chunker, numbers, decodes, 2) for numbers in ([0, 1, 2], [1, 2], [0, 1, 2])]
    assert steps == [[0, 1], [1, 2], [0, 1]], "no decode was skipped in the second step: the third begins anew"


@given(data=st.data(), room=st.integers(1, 6))
def test_no_decode_waits_longer_than_one_rotation_while_others_start_and_end(data: st.DataObject, room: int) -> None:
    chunker, known = Chunker(TokenBudget(1, 8)), dict[int, SequenceState]()
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
