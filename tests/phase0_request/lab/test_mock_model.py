from typing import Any

import pytest

from phase0_request import Request, SamplingParams, reason_to_finish
from phase0_request.lab.mock_model import MockModel

EOS = 0


def generate(model: MockModel, prompt: tuple[int, ...], **params: Any) -> list[int]:
    request = Request("r", prompt, SamplingParams(**params))
    request.admit(0.0)
    while True:
        request.advance(request.computed, request.total - request.computed)
        request.append(model.next_token(request), 0.0)
        if reason_to_finish(request, [EOS]):
            return request.output_tokens


def test_a_prompt_always_gets_the_same_answer_then_eos() -> None:
    model = MockModel({(n,): [n + 10, n + 11] for n in range(50)}, EOS)
    assert generate(model, (1,)) == [11, 12, EOS]
    assert generate(model, (1,), max_tokens=1) == [11]
    assert generate(model, (1,), ignore_eos=True, max_tokens=5) == [11, 12, 11, 12, 11]
    assert generate(model, (1,), min_tokens=3) == [11, 12, 11, EOS]
    unknown = generate(model, (7, 7, 7))
    assert unknown == generate(model, (7, 7, 7))
    assert {tuple(generate(model, (7, 7, 7), seed=seed)) for seed in range(20)} > {tuple(unknown)}


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_k": 5}, {"logit_bias": {1: 1.0}}], ids=str)
def test_unsupported_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    model = MockModel({(1,): [11]}, EOS)
    with pytest.raises(ValueError, match=f"^{next(iter(params))}=.* is not supported by the mock"):
        model.check(SamplingParams(**params))
    model.check(SamplingParams(temperature=0, stop="x", seed=3))
