"""The lab of this phase: the demo, drawings of the tree, the benchmark, the study, and replayed conversations."""
