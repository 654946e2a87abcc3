"""The argument checks shared by all phases: what they accept, and what their messages say."""

from math import inf, nan
from typing import Any

import pytest

from phase0_request.support.checks import check_int, check_number


def test_integers_within_their_bounds() -> None:
    for value in (1, 7, 10):
        assert check_int("n", value, 1, 10) is check_int("n", value, 1) is value
    for wrong in (0, 11, True, 1.0, "1", None, nan):
        with pytest.raises(ValueError, match=f"^n must be an integer from 1 to 10, got {wrong!r}$"):
            check_int("n", wrong, 1, 10)
    assert check_int("n", 10**30, 1) == 10**30
    with pytest.raises(ValueError, match=r"^n must be an integer from 1, got 0$"):
        check_int("n", 0, 1)


@pytest.mark.parametrize(
    ("bounds", "accepted", "refused", "allowed"),
    [
        ({}, [0, -1e300, 10**300], [inf, -inf, nan, True, "1", None], "a finite number"),
        ({"low": 0}, [0, 0.5, 1e300], [-1e-9, inf, nan], "a number from 0"),
        ({"low": 0, "above": True}, [1e-9], [0, 0.0, -1], "a number above 0"),
        ({"low": 0, "high": 1}, [0, 1, 1.0], [-0.1, 1.1, True], "a number from 0 to 1"),
        ({"low": 0, "high": 1, "above": True}, [0.1, 1], [0, 2], "a number above 0 and at most 1"),
        ({"low": 0, "high": 1, "below": True}, [0, 0.99], [1, 1.0], "a number from 0 and below 1"),
    ],
)
def test_numbers_within_their_bounds(
    bounds: dict[str, Any], accepted: list[Any], refused: list[Any], allowed: str
) -> None:
    for value in accepted:
        assert check_number("x", value, **bounds) is value
    for value in refused:
        with pytest.raises(ValueError, match=f"^x must be {allowed}, got {value!r}$"):
            check_number("x", value, **bounds)


def test_a_huge_value_is_shortened_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"^x must be a number from 0, got a far larger number$"):
        check_number("x", 10**400, 0)  # no float can hold it
    with pytest.raises(ValueError, match=r"got a far larger number$"):
        check_int("n", 10**5000, 1, 10)
    with pytest.raises(ValueError, match=r"got 'xxx.*\.\.\.$") as refusal:
        check_int("n", "x" * 10**6, 1)
    assert len(str(refusal.value)) < 200
