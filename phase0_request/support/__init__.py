"""What every phase needs besides the lesson: checks of values, commands, files of a model, the machine."""
