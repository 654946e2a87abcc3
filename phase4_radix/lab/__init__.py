"""The lab of this phase: the demo, the tree drawn, the benchmark, the study, and replayed conversations."""
