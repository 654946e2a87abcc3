"""Drawings of mechanisms, made by the engine's own code where there is a run to draw."""
