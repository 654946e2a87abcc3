"""The lab of this phase: the demo, the load generator, what HTTP and a process of one's own cost, and what keeps a GPU
busy or idle."""
