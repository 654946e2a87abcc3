"""The lab of this phase: a server with a mock model, the viewer of all demos, and the report of all benchmarks."""
