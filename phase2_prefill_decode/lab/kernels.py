"""`python -m phase2_prefill_decode.lab kernels`: compile this phase's kernels ahead of time, and inspect the result."""

from phase1_kv_pool.lab import report


def main(arguments: list[str] | None = None) -> int:
    return report.main("phase2_prefill_decode.lab", arguments)
