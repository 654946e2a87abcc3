"""Other engines beside this one, and those of the phases: what a comparison runs."""
