"""The store as a Triton kernel."""
