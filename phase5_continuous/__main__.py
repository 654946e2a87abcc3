"""`python -m phase5_continuous`: watch the batch change: who waits, who computes what, who loses its pages."""

from phase0_request.entry import run

run("phase5_continuous.lab.demo:main")
