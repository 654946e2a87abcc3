"""Many replicas, and an engine in two parts: simulated and measured."""
