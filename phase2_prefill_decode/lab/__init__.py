"""The lab of this phase: the demo, cost model and roofline, and benchmarks."""
