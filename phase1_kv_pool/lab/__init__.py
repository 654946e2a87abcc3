"""The lab of this phase: the demo, the fragmentation study, the benchmark, and kernels compiled ahead of time."""
