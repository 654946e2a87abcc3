"""Which tokens of a draft are accepted, from the tokens that a step drew."""

import math
from collections.abc import Sequence

import pytest

from phase0_request import Request, SamplingParams
from phase0_request.batch import Slice, StepOutput
from phase2_prefill_decode.extras.outcome import drawn_of
from phase2_prefill_decode.extras.verification import VerificationWork
from phase2_prefill_decode.sampling.processors import DrawRow


def kept(slices: Sequence[tuple[Sequence[int], Sequence[int]]], without: Sequence[int] = ()) -> list[list[int]]:
    """The tokens that slices give: each has a draft, and the tokens drawn from its rows. Rows `without` a finite peak
    give none."""
    draws, tokens, first = list[DrawRow](), list[int](), list[int]()
    for number, (draft, drawn) in enumerate(slices):
        part = Slice(Request(f"{number}", (1,), SamplingParams()), 1, 1 + len(draft), tuple(draft))
        draws += [DrawRow(len(tokens) + place, number, part, place) for place in range(len(drawn))]
        first.append(drawn[0])
        tokens += drawn
    output = StepOutput(first)
    peaks = [-math.inf if row in without else 1.0 for row in range(len(tokens))]
    VerificationWork(draws).finish(output, tokens, peaks)
    return [drawn_of(output, number) for number in range(len(slices))]


@pytest.mark.parametrize(
    ("draft", "drawn", "wanted"),
    [
        ((5, 6, 7), (5, 6, 7, 8), [5, 6, 7, 8]),
        ((5, 6, 7), (5, 6, 9, 4), [5, 6, 9]),
        ((5, 6, 7), (9, 6, 7, 8), [9]),
        ((), (5,), [5]),
    ],
)
def test_a_draft_counts_up_to_its_first_wrong_token(
    draft: tuple[int, ...], drawn: tuple[int, ...], wanted: list[int]
) -> None:
    (found,) = kept([(draft, drawn)])
    assert found == wanted, f"draft {draft}, and {drawn} drawn from its rows"


def test_slices_are_judged_by_themselves() -> None:
    found = kept([((5,), (5, 6)), ((), (6,)), ((6, 7), (6, 8, 9))])
    assert found == [[5, 6], [6], [6, 8]], "the second slice has no draft, the third one its own"


def test_a_row_that_gives_no_token_ends_the_run() -> None:
    (found,) = kept([((5, 6, 7), (5, 6, 7, 8))], without=[2])
    assert found == [5, 6], "row 2 has no finite peak, so its token does not count, and none after it"
