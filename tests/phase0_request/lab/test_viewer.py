"""The viewer against the requests that it shows."""

import io
import re
from collections.abc import Sequence

from rich.console import Console

from phase0_request.lab.batcher import Batcher
from phase0_request.lab.demo import arrivals, serve
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.questions import QUESTIONS
from phase0_request.lab.viewer import Line, Recording, show
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer


def recorded(batch_size: int) -> tuple[Sequence[Request], Recording]:
    tokenizer = Tokenizer.from_pretrained()
    requests = arrivals(tokenizer, 6, rate=8.0, seed=1)
    model = MockModel.replaying(tokenizer, QUESTIONS.items(), StepCost())
    return requests, serve(requests, model, Batcher(tokenizer.eos_ids, batch_size))


def test_a_column_is_the_life_of_a_request() -> None:
    """It waits, prefills once, decodes once for each token after the first, and is gone."""
    requests, recording = recorded(batch_size=2)
    for number, request in enumerate(requests):
        life = "".join(line.signs[number : number + 1] or " " for line in recording.lines)
        assert re.fullmatch(r" *·*▒█+ *", life)
        assert life.count("█") == len(request.output_tokens) - 1
    assert any("·" in line.signs for line in recording.lines)


def test_steps_that_decode_the_same_requests_are_one_line() -> None:
    lines = [Line(n, n, prefill, 1, 2, seconds, "█") for n, prefill, seconds in ((1, 5, 0.4), (2, 0, 0.1), (3, 0, 0.3))]
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        show(console, "title", lines, "requests")
    first, second = captured.get().splitlines()[-2:]
    assert first.split()[:5] == ["1", "5", "1", "2", "400.0"]
    assert second.split()[:4] == ["2-3", "1", "2", "200.0"]
    assert first.split()[-1].count("█") == 2 * second.split()[-1].count("█") + 1
