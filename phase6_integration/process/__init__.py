"""The engine in a process of its own: the messages, the two ends of the line, and the text of the outputs."""
