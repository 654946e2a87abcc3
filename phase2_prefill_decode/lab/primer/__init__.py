"""The Triton primer of chapter 2: a first kernel, eight puzzles, and two ways to look at a kernel."""
