"""What extras keep with a request."""

import pytest

from phase0_request import Request, SamplingParams, TokenLogprobs
from phase0_request.request import InvalidTransitionError
from phase2_prefill_decode.extras.outcome import add_prompt_logprobs, extras_of


def test_prompt_logprobs_come_in_order_and_tokens_without_them_are_not_taken_from_the_cache() -> None:
    request = Request("r", (1, 2, 3), SamplingParams(prompt_logprobs=0))
    with pytest.raises(InvalidTransitionError, match="0 are known"):
        add_prompt_logprobs(request, 1, [TokenLogprobs(-1.0, ())])
    with pytest.raises(InvalidTransitionError, match="its prompt has 3 tokens"):
        add_prompt_logprobs(request, 0, [TokenLogprobs(-1.0, ())] * 3)
    add_prompt_logprobs(request, 0, [TokenLogprobs(-1.0, ())])
    assert request.cacheable_tokens == 1
    add_prompt_logprobs(request, 0, [TokenLogprobs(-9.0, ()), TokenLogprobs(-2.0, ())])
    assert [score.logprob for score in extras_of(request).prompt_logprobs] == [-1.0, -2.0]
    assert request.cacheable_tokens == 3
