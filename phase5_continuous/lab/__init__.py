"""The lab of this phase: the demo, traces and the simulator, benchmarks and studies."""
