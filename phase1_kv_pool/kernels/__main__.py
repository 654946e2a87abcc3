"""`python -m phase1_kv_pool.kernels`: registers, stack and accesses of the store kernel on three kinds of GPU."""

from phase1_kv_pool.kernels.report import main

if __name__ == "__main__":
    raise SystemExit(main("phase1_kv_pool.kernels"))
