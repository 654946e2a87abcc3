"""Helpers of every phase, outside the lesson: checks of values, commands, files of a model, the machine."""
