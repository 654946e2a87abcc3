import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phase0_request import FinishReason, SamplingParams
from phase0_request.lab.clients import Demo, DemoConfig
from phase0_request.lab.demo import main
from phase0_request.lab.mock_model import StepCost
from tests.phase0_request.support import run
from tests.terminal import after_the_view, on_a_terminal

FREE = StepCost(0, 0, 0)
DEMO = [sys.executable, "-m", "phase0_request"]


def test_every_client_is_answered_from_the_corpus() -> None:
    demo = Demo.of(DemoConfig(num_requests=12, arrival_rate=0, cost=FREE))
    summary = run(demo.run())
    assert summary.requests == 12
    for client in demo.clients:
        assert client.request is not None
        assert client.request.finish_reason is FinishReason.STOP
        assert client.answer == demo.tokenizer.decode(client.request.output_tokens)
        assert len(client.answer.split()) >= 5
    assert summary.tokens == sum(len(c.request.output_tokens) for c in demo.clients if c.request)


def test_questions_and_arrival_times_are_deterministic_for_a_seed() -> None:
    def clients(seed: int) -> list[tuple[str, float]]:
        return [(c.question, c.arrives_at) for c in Demo.of(DemoConfig(seed=seed, arrival_rate=5)).clients]

    assert clients(1) == clients(1)
    assert clients(1) != clients(2)
    moments = [moment for _, moment in clients(1)]
    assert moments == sorted(moments)


def test_clients_beyond_the_queue_limit_are_refused() -> None:
    demo = Demo.of(DemoConfig(num_requests=10, batch_size=1, queue_limit=3, arrival_rate=0, cost=FREE))
    summary = run(demo.run())
    refused = [c for c in demo.clients if c.refusal]
    assert summary.requests + len(refused) == 10
    assert refused
    assert all("the queue is full" in (c.refusal or "") for c in refused)


@pytest.mark.parametrize(
    "option", ["--num-requests=0", "--batch-size=0", "--arrival-rate=-1", "--arrival-rate=nan", "--max-tokens=0"]
)
def test_bad_options_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([option])
    assert option.split("=")[0].lstrip("-") in capsys.readouterr().err.splitlines()[-1]


def test_the_command_prints_plain_text_when_piped(tmp_path: Path) -> None:
    trace = tmp_path / "trace.chrome.json"
    command = [*DEMO, "--num-requests", "4", "--batch-size", "2", "--max-tokens", "8", "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert re.search(r"^4 requests, \d+ tokens in [\d.]+ s: \d+ tokens/s", done.stdout, re.MULTILINE)
    assert re.search(r"time to first token \(TTFT\) +[\d.]+ +[\d.]+ +[\d.]+", done.stdout)
    assert len({e["tid"] for e in json.loads(trace.read_text())["traceEvents"]}) == 4


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--trace", str(tmp_path / "no" / "x.json")])
    shown = capsys.readouterr()
    assert "no/x.json" in shown.err.splitlines()[-1]
    assert shown.out == ""


def test_cancelling_a_client_aborts_its_request() -> None:
    async def scene() -> None:
        demo = Demo.of(DemoConfig(num_requests=1, arrival_rate=0))
        (client,) = demo.clients
        async with demo.server:
            talk = asyncio.create_task(client.talk(demo.server, SamplingParams()))
            while client.request is None:
                await asyncio.sleep(0)
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)
            assert client.request.finish_reason is FinishReason.ABORT

    run(scene())


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    """Interrupted while it draws: it aborts the requests and restores the cursor."""
    status, seen = on_a_terminal(*DEMO, "--num-requests", "500", "--arrival-rate", "50", until=b"step 1")
    assert status == 130
    assert after_the_view(seen).count(b"\n") <= 2
    assert b"were aborted" in after_the_view(seen)
    assert b"Traceback" not in seen
    assert b"never retrieved" not in seen
