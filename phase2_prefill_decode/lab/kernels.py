"""`python -m phase2_prefill_decode.lab kernels`: what the compiler makes of the kernels of this phase."""

from phase1_kv_pool.lab import report


def main(arguments: list[str] | None = None) -> int:
    return report.main("phase2_prefill_decode.lab", arguments)
