"""The lab of this phase: a server whose model is a mock, the demo, the benchmark, and the bundled model's corpus."""
