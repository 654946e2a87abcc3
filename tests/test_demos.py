"""Each phase's demo runs, in 80 columns and into a file, and shows what its chapter says."""

import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

DEMOS = {
    "phase0_request": (["-n", "8"], r"█·.*tokens/s; median TTFT"),
    "phase1_kv_pool": ([], r"blocks of 128:.*0░.*pages of 16:.*slots with a token"),
    "phase2_prefill_decode": (["What is a page?"], r"A page is .*1  .*▒.*2-.*█.*a token of \d+ costs"),
    "phase3_chunked_prefill": (
        ["--prompt", "200", "--decodes", "3"],
        r"arrives, whole.*█▒.*in chunks of 128.*█▒.*worst gap",
    ),
    "phase4_radix": ([], r"2 locks.*[1-9]\d* duplicates and [1-9]\d* evicted"),
    "phase5_continuous": ([], r"x preempted.*x·.*TTFT p50"),
    "phase6_integration": ([], r"▒▒··.*What is a KV cache\?.*A KV cache keeps.*of the prompt tokens were cached"),
}


@pytest.mark.parametrize("phase", DEMOS)
def test_a_demo_shows_its_lesson(
    phase: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, shown = DEMOS[phase]
    monkeypatch.setenv("COLUMNS", "80")
    assert import_module(f"{phase}.lab.demo").main(options) == 0
    out = capsys.readouterr().out
    assert re.search(shown, out, re.DOTALL), out
    assert max(map(len, out.splitlines())) <= 80


def test_no_request_of_a_demo_has_the_sign_of_a_state() -> None:
    from phase0_request.lab.viewer import KEY
    from phase1_kv_pool.lab.demo import SYMBOLS, TRACE

    assert not set(SYMBOLS) & set(KEY)
    assert len(SYMBOLS) >= TRACE.num_requests


def test_a_phase_runs_by_its_name() -> None:
    command = [sys.executable, "-m", "phase0_request", "-n", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONUTF8": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "median TTFT" in done.stdout
