"""Tool calls and reasoning: the grammar of an answer that has them, and its reading."""
