import pytest

from phase5_continuous.lab.traces import EOS, INSTRUCTION, KINDS, WORD, Trace

MANY = 4000


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    first, again, other = (list(Trace(kind=kind, requests=200, seed=seed).arrivals()) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 200
    assert [one.time for one in first] == sorted(one.time for one in first)
    assert all(one.prompt and one.answer >= 1 for one in first)
    if kind in ("poisson", "bursty", "batch"):
        assert len({one.prompt[0] for one in first} - {EOS, WORD}) == 200, "prompts share no prefix"


def test_a_turn_of_a_chat_repeats_the_earlier_questions_and_answers() -> None:
    arrivals = list(Trace(kind="chat", requests=600, prompt=30, answer=20, rate=5.0).arrivals())
    assert len({one.prompt[:INSTRUCTION] for one in arrivals}) == 4
    going_on = 0
    for number, one in enumerate(arrivals):
        answer = (*(WORD,) * (one.answer - 1), EOS)
        whole = one.prompt + answer
        later = [other for other in arrivals[number + 1 :] if other.prompt[: len(whole)] == whole]
        going_on += bool(later)
        assert all(other.time > one.time for other in later)
    assert going_on > 300  # most have a next turn
    questions = [one.prompt[INSTRUCTION:] for one in arrivals]
    assert len(set(questions)) == len(questions)
