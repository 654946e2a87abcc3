"""Tool calls and reasoning: the grammar of an answer that has them, and how it is read."""
