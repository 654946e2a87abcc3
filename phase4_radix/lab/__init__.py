"""The lab of this phase: the demo, the drawing of the tree, the benchmark, the study, and replayed conversations."""
