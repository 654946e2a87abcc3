"""`python -m phase1_kv_pool.lab kernels`: registers, stack and accesses of the store kernel on three kinds of GPU."""

from phase1_kv_pool.lab import report


def main(arguments: list[str] | None = None) -> int:
    return report.main("phase1_kv_pool.lab", arguments)
