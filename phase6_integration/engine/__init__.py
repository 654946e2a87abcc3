"""The engine as an object of one process: its options, its assembly, its statistics, and the isolation of faults."""
