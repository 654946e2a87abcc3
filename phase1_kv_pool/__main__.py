"""`python -m phase1_kv_pool`: watch pages change hands, beside the same memory given out in blocks of the longest."""

from phase0_request.entry import run

run("phase1_kv_pool.lab.demo:main")
