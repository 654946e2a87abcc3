"""`python -m phase1_kv_pool`: watch page allocation, beside the same memory in contiguous blocks."""

from phase0_request.support.entry import run

run("phase1_kv_pool.lab.demo:main")
