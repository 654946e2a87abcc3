"""The lab of this phase: the demo, the benchmark, the study, and replayed conversations."""
