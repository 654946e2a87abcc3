"""The lab of this phase: the demo, the ladder of all phases, the cost of HTTP and of a process, and a GPU kept busy."""
