"""The lab of this phase: a server with a mock model, the demo, the benchmark, and the bundled model's corpus."""
