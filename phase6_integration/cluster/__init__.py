"""Many replicas of the engine behind one address, run by Ray Serve."""
