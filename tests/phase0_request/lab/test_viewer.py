"""The viewer against the requests that it shows."""

import re
from collections.abc import Sequence

from phase0_request.lab.batcher import Batcher
from phase0_request.lab.demo import arrivals, serve
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.questions import QUESTIONS
from phase0_request.lab.viewer import Recording
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
