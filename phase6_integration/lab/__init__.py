"""The lab of this phase: the demo, the load generator, and what HTTP and a process of one's own cost."""
