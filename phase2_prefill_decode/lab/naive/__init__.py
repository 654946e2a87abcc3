"""The forms of this phase that one would write first, and that break."""
