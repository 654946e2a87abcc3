"""The lab of this phase: the demo, the study of fragmentation, the benchmark, and what compilers make of the kernel."""
