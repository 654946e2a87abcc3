"""The stall scene and its figures, which are computed from given times."""

import pytest
import torch

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.loading.model import Model
from phase3_chunked_prefill.lab.stall import WHOLE, Outcome, Played, Scene, Stage, judge
from tests.phase2_prefill_decode.tiny import TINY

SCENE = Scene(decodes=3, context=5, answer=30, arrives=4, prompt=200)


@pytest.fixture(scope="module")
def stage() -> Stage:
    cpu = torch.device("cpu")
    return Stage(Model.random(TINY, device=cpu), SCENE)


def tokens_of(played: Played) -> list[tuple[int, int]]:
    return [(step.prefill_tokens, step.decode_tokens) for step in played.steps]


@pytest.mark.parametrize(
    ("chunk", "pieces"), [(WHOLE, [200]), (64, [64, 64, 64, 8]), (40, [32] * 5 + [40]), (16, [16] * 12 + [8])]
)
def test_decodes_advance_with_every_chunk(stage: Stage, chunk: int, pieces: list[int]) -> None:
    """An answer of 30 tokens: one of the step before the scene, 29 of the steps in it."""
    calm, after = [(0, 3)] * 4, [(0, 3)] * (25 - len(pieces))
    assert tokens_of(stage.play(chunk)) == calm + [(piece, 3) for piece in pieces] + after


def at(moments: list[float], arrival: float = 0.0) -> Request:
    """A request that got its tokens at these times."""
    params = SamplingParams(max_tokens=len(moments))
    request = Request("r", (1, 2), params, arrival=arrival)
    request.admit(arrival)
    request.advance(0, 2)
    for n, moment in enumerate(moments):
        request.append(7, moment)
        if n + 1 < len(moments):
            request.advance(request.computed, 1)
    request.finish(FinishReason.LENGTH, moments[-1])
    return request


def test_gaps_are_counted_from_the_arrival_of_the_long_prompt_to_its_first_token() -> None:
    # It arrives at 10 and has its token at 20. The gap from 20 to 35 comes after that, those up to 10 are calm.
    decodes = [at([7.5, 8.0, 10.0, 14.0, 20.0, 35.0]), at([6.0, 9.0, 11.0, 20.0, 21.0, 30.0])]
    outcome = judge(64, Played([], decodes, at([20.0], arrival=10.0)))
    assert outcome.p99_gap_ms == pytest.approx(8910.0)
    assert outcome == Outcome(
        chunk=64,
        calm_gap_ms=2000.0,  # of 0.5, 2 and 3
        p50_gap_ms=5000.0,  # of 2 (begun at 9), 4, 6 and 9 seconds
        p99_gap_ms=outcome.p99_gap_ms,
        worst_gap_ms=9000.0,
        ttft_ms=10_000.0,
        total_ms=25_000.0,
    )
