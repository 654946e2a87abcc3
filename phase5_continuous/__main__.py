"""`python -m phase5_continuous`: watch the batch change: requests wait, prefill, decode and are preempted."""

from phase0_request.support.entry import run

run("phase5_continuous.lab.demo:main")
