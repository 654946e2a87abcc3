"""What extras add to the progress of a request."""

from phase0_request import TokenLogprobs
from phase6_integration.extras.reports import reports
from tests.phase6_integration.scripted_loop import ask, progress, run


def test_prompt_logprobs_come_with_the_first_token_only() -> None:
    _, line = run([ask("scored", prompt=4, prompt_logprobs=0), ask("plain", prompt=4)], extras=[reports])
    found = [(new.id, new.prompt_logprobs) for new in progress(line) if new.token is not None][:4]
    wanted = [("scored-0", [TokenLogprobs(-1.0, ())] * 3), ("plain-0", None), ("scored-0", None), ("plain-0", None)]
    assert found == wanted, "a request that has none says None, not []; one that has some says them once"
