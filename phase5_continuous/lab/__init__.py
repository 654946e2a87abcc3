"""The lab of this phase: the demo, traces and the simulator, static batching beside it, benchmarks and studies."""
