"""A guess is compared with what was found; without a reader there is none, and nothing is printed."""

import pytest

from chapters.predictions import Prediction, guess


def test_a_guess_is_compared_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "1,500")
    guess("How many?").compare(1000, "ms")
    assert capsys.readouterr().out == "It is 1,000 ms. You said 1,500 ms, 1.5 times as much.\n"


@pytest.mark.parametrize("given", ["", "many", EOFError(), RuntimeError()])
def test_no_answer_is_no_guess(
    given: str | Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(_: str) -> str:
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr("builtins.input", answer)
    assert guess("How many?") == Prediction(None)
    guess("How many?").compare(3)
    assert capsys.readouterr().out == ""
