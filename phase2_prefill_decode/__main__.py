"""`python -m phase2_prefill_decode "What is a KV cache?"`: a streamed answer, then where its time went."""

from phase0_request.support.entry import run

run("phase2_prefill_decode.lab.demo:main")
