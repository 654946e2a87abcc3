"""Dense families: a module for each group."""
