"""How the bundled model is made: its questions, its training, and the examination it has to pass."""
