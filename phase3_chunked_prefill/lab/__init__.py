"""The lab of this phase: the demo, the measurement of stalls, and ahead-of-time compilation of the kernels."""
