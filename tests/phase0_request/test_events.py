from typing import Any

import pytest

from phase0_request import FinishReason, Request, SamplingParams, reason_to_finish

EOS = (0, 2)  # models name several


def said(tokens: list[int], **params: Any) -> Request:
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
        ([7, 5], {"stop_token_ids": [7]}, None),  # only the newest counts
        ([5, 2], {"min_tokens": 2}, None),
        ([5, 6, 2], {"min_tokens": 2}, FinishReason.STOP),
        ([5, 7], {"min_tokens": 2, "stop_token_ids": [7]}, None),
        ([5, 2], {"min_tokens": 2, "max_tokens": 2}, FinishReason.LENGTH),
    ],
)
def test_when_a_token_is_the_last(tokens: list[int], params: dict[str, Any], reason: FinishReason | None) -> None:
    assert reason_to_finish(said(tokens, **params), EOS) is reason
