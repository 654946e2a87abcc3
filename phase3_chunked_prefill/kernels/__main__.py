"""`python -m phase3_chunked_prefill.kernels`: what the compiler makes of the kernels of this phase."""

from phase1_kv_pool.kernels.report import main

if __name__ == "__main__":
    raise SystemExit(main("phase3_chunked_prefill.kernels"))
