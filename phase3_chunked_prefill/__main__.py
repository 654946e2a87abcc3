"""`python -m phase3_chunked_prefill`: eight requests decode when a long prompt arrives, first whole, then in chunks."""

from phase0_request.support.entry import run

run("phase3_chunked_prefill.lab.demo:main")
