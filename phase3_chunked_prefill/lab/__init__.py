"""The lab of this phase: the demo, and the measurement of stalls."""
