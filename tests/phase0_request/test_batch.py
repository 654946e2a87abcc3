from collections.abc import Callable
from typing import Any

import pytest

from phase0_request import Batch, FinishReason, Request, SamplingParams, Slice, reason_to_finish


def running(request: Request, computed: int, output: int = 0) -> Request:
    request.admit(0.0)
    for token in range(output):
        request.advance(request.computed, request.total - request.computed)
        request.append(token, 0.0)
    if computed < request.computed:
        request.preempt()
        request.admit(0.0)
    if computed > request.computed:
        request.advance(request.computed, computed - request.computed)
    return request


def is_decode(piece: Slice) -> bool:
    prefill, decode = Batch((piece,)).tokens_by_kind
    assert prefill + decode == piece.length
    return decode > 0


def test_a_slice_completes_its_request_or_is_a_decode_by_its_extent(make_request: Callable[..., Request]) -> None:
    fresh = running(make_request(prompt=8), computed=0)
    slices = Slice(fresh, 0, 8), Slice(fresh, 0, 5), Slice(fresh, 5, 3)
    assert [piece.completes for piece in slices] == [True, False, True]
    assert not any(map(is_decode, slices))
    decode = Slice(running(make_request(prompt=8), computed=9, output=2), 9, 1)
    assert decode.completes
    assert is_decode(decode)


def test_a_slice_is_a_prefill_unless_it_is_the_newest_output_token(make_request: Callable[..., Request]) -> None:
    """One token of a prompt, the last of a cached one, and what is computed again after a preemption."""
    preempted = running(make_request(prompt=4), computed=0, output=3)
    cached = Slice(running(make_request(prompt=8), 7), 7, 1)
    for piece in (Slice(running(make_request(prompt=1), 0), 0, 1), cached, Slice(preempted, 0, 7)):
        assert piece.completes
        assert not is_decode(piece)
    assert not is_decode(Slice(preempted, 4, 1))


def test_a_batch_counts_its_tokens_by_kind(make_request: Callable[..., Request]) -> None:
    slices = (
        Slice(running(make_request(prompt=8), 9, 2), 9, 1),
        Slice(running(make_request(prompt=2), 2, 1), 2, 1),
        Slice(running(make_request(prompt=6), 0), 0, 4),
    )
    batch = Batch(slices)
    assert (len(batch), batch.num_tokens, batch.tokens_by_kind) == (3, 6, (4, 2))
    assert tuple(batch) == slices
    assert not Batch()


EOS = (0, 2)  # models have several


def after_output(tokens: list[int], **params: Any) -> Request:
    request = Request("r", (1,), SamplingParams(**params))
    request.admit(0.0)
    for token in tokens:
        request.advance(request.computed, 1)
        request.append(token, 0.0)
    return request


@pytest.mark.parametrize(
    ("tokens", "params", "reason"),
    [
        ([5], {}, None),
        ([5, 0], {}, FinishReason.STOP),
        ([5, 2], {}, FinishReason.STOP),
        ([5, 6], {"max_tokens": 2}, FinishReason.LENGTH),
        ([5, 2], {"max_tokens": 2}, FinishReason.STOP),
        ([2], {"max_tokens": 1}, FinishReason.STOP),
        ([5, 2], {"ignore_eos": True}, None),
        ([5, 2], {"ignore_eos": True, "max_tokens": 2}, FinishReason.LENGTH),
        ([5, 7], {"stop_token_ids": [7]}, FinishReason.STOP),
        ([5, 7], {"stop_token_ids": [7], "ignore_eos": True}, FinishReason.STOP),
        ([7, 5], {"stop_token_ids": [7]}, None),  # only the newest token counts
        ([5, 2], {"min_tokens": 2}, None),
        ([5, 6, 2], {"min_tokens": 2}, FinishReason.STOP),
        ([5, 7], {"min_tokens": 2, "stop_token_ids": [7]}, None),
        ([5, 2], {"min_tokens": 2, "max_tokens": 2}, FinishReason.LENGTH),
    ],
)
def test_reason_to_finish_after_the_newest_token(
    tokens: list[int], params: dict[str, Any], reason: FinishReason | None
) -> None:
    found = reason_to_finish(after_output(tokens, **params), EOS)
    given = ", ".join(f"{name} {value}" for name, value in params.items()) or "no parameters"
    assert found is reason, f"output {tokens}, eos_ids {EOS}, {given}: {found}, not {reason}"
