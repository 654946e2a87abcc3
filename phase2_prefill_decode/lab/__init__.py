"""The lab of this phase: the demo, cost model and roofline, benchmarks, and the training of the bundled model."""
