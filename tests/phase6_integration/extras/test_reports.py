"""What extras add to the progress of a request."""

from msgspec.msgpack import decode

from phase0_request import TokenLogprobs
from phase6_integration.extras.fields.token_details import Report
from phase6_integration.extras.reports import reports
from tests.phase6_integration.scripted_loop import ask, progress, run


def test_prompt_logprobs_come_with_the_first_token_only() -> None:
    _, line = run([ask("scored", prompt=4, prompt_logprobs=0), ask("plain", prompt=4)], extras=[reports])
    told = [(new.id, new.more and decode(new.more, type=Report)) for new in progress(line) if new.token is not None]
    found = [(id, report and report.prompt_logprobs) for id, report in told][:4]
    wanted = [("scored-0", [TokenLogprobs(-1.0, ())] * 3), ("plain-0", None), ("scored-0", None), ("plain-0", None)]
    assert found == wanted, "a request that has none says None, not []; one that has some says them once"
