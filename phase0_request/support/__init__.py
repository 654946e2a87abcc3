"""Helpers of every phase, apart from the lesson: checks of values, commands, files of a model, the machine."""
