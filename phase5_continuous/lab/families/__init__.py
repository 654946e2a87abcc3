"""Every family that loads, beside transformers."""
