import dataclasses
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from phase0_request import SamplingParams

REFUSED: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 10**12),
    ("min_tokens", 129),  # above max_tokens
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1 << 40),
    ("min_p", 1.01),
    ("presence_penalty", 2.01),
    ("frequency_penalty", -2.01),
    ("repetition_penalty", 1e-45),
    ("repetition_penalty", 10.01),
    ("seed", 1 << 63),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", "no"),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 257),
    ("stop", [1]),
    ("stop", b"bytes"),
    ("stop", {"a", "b"}),  # a set has no order
    ("stop", "half \ud800"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 31]),
    ("stop_token_ids", 3),
    ("stop_token_ids", list(range(129))),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {"1": 0.0}),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", [(1, 2.0, 3.0)]),
    ("logit_bias", ""),
    ("logit_bias", b""),
    ("logit_bias", iter([(1, 2.0)])),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("grammar", ""),
    ("grammar", {"type": "object"}),
    ("grammar", "x" * ((1 << 20) + 1)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", [1, True]),
    ("allowed_token_ids", [1 << 24]),
    ("bad_words", [[]]),
    ("bad_words", ["word"]),
    ("bad_words", [[1]] * 129),
    ("bad_words", [[1] * 257]),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[f"{field}-{n}" for n, (field, _) in enumerate(REFUSED)])
def test_a_wrong_value_is_refused_with_the_field_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be .*, got ") as refusal:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 300


def test_the_message_says_what_is_allowed_and_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"^temperature must be a number from 0 to 100, got -1$"):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match=r"^min_tokens must be an integer from 0 to max_tokens \(4\), got 5$"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_equivalent_forms_are_normalized() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert [SamplingParams(top_k=top_k).top_k for top_k in (-1, 0, 1)] == [0, 0, 1]


def test_params_are_immutable_hashable_and_copy_their_lists() -> None:
    stops, bias, ids = ["a"], {1: 2.0}, [5]
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=ids)
    stops.append("b")
    bias[2] = 3.0
    ids.append(-1)
    assert params.stop == ("a",)
    assert params.logit_bias == ((1, 2.0),)
    assert params.stop_token_ids == (5,)
    assert hash(params) == hash(SamplingParams(stop="a", logit_bias=[(1, 2.0)], stop_token_ids=(5,)))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)
fields = st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)])


@given(st.dictionaries(fields, anything, max_size=4))
def test_any_value_is_accepted_or_refused_with_the_field_name(given: dict[str, object]) -> None:
    """No other exception escapes; accepted values are finite and round-trip through the constructor."""
    try:
        params = SamplingParams(**given)  # type: ignore[arg-type]
    except ValueError as error:
        refused = str(error).split(" ")[0]
        event(f"refused: {refused}")
        assert refused in given or refused == "min_tokens"
        return
    again = SamplingParams(**{f.name: getattr(params, f.name) for f in dataclasses.fields(params)})
    assert again == params
    assert all(math.isfinite(v) for v in dataclasses.asdict(params).values() if isinstance(v, float))


def test_allowed_tokens_are_a_bitmap_of_whole_words() -> None:
    """All of a vocabulary of 152,000 were 5 MB in each of n completions."""
    every = SamplingParams(allowed_token_ids=range(151_936)).allowed
    assert every is not None
    assert (len(every.bits), every.highest) == (151_936 // 8, 151_935)
    few = SamplingParams(allowed_token_ids=[40, 7, 7]).allowed
    assert few is not None
    bits = np.unpackbits(np.frombuffer(few.bits, np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [7, 40]
    assert (len(few.bits), few.highest) == (8, 40)


def test_completions_of_a_request_differ_in_length_and_seed_and_share_the_rest() -> None:
    params = SamplingParams(min_tokens=2, seed=1, bad_words=[[1, 2]], allowed_token_ids=[5], logit_bias={3: 1.0})
    other = params.vary(9, 2)
    assert other == replace(params, max_tokens=9, seed=2)
    assert all(
        getattr(other, name) is getattr(params, name) for name in ("bad_words", "allowed_token_ids", "logit_bias")
    )
    with pytest.raises(ValueError, match="min_tokens"):
        params.vary(1, 2)
    with pytest.raises(ValueError, match="seed"):
        params.vary(9, 1 << 63)


def test_the_highest_token_is_that_of_any_field() -> None:
    assert SamplingParams().highest_token[0] == -1
    for name, value in (("stop_token_ids", [9]), ("logit_bias", {9: 1.0}), ("bad_words", [[2, 9, 1]])):
        assert SamplingParams(**{name: value}).highest_token == (9, name)  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=[9]).highest_token == (9, "allowed_token_ids")
