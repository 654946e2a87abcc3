"""Each phase's demo runs, in 80 columns and into a file, and shows what its chapter says."""

import os
import re
import subprocess
import sys

import pytest

DEMOS = {
    "phase0_request": (["-n", "8"], r"█·.*tokens/s; median TTFT"),
    "phase1_kv_pool": ([], r"blocks of 128:.*0░.*pages of 16:.*slots with a token"),
    "phase2_prefill_decode": (["What is a page?"], r"A page is .*1  .*▒.*2-.*█.*a token of \d+ costs"),
    "phase3_chunked_prefill": (["--prompt", "400"], r"arrives, whole.*█▒.*in chunks of 128.*█▒.*worst gap"),
    "phase4_radix": ([], r"2 locks.*[1-9]\d* duplicates and [1-9]\d* evicted"),
    "phase5_continuous": ([], r"x preempted.*x·.*TTFT p50"),
    "phase6_integration": ([], r"▒▒··.*What is a KV cache\?.*A KV cache keeps.*of the prompt tokens were cached"),
}


@pytest.mark.parametrize("phase", DEMOS)
def test_a_demo_shows_its_lesson(phase: str) -> None:
    options, shown = DEMOS[phase]
    environment = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", phase, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout, re.DOTALL), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
