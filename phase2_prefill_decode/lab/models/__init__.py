"""Published models: their shapes, and what these take of memory and arithmetic."""
