"""`python -m phase2_prefill_decode.lab NAME`: run a module of this lab; without NAME, a list of them."""

from phase0_request.support.entry import run

run("phase0_request.lab.commands:main", "phase2_prefill_decode.lab")
