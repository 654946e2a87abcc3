"""The request and answer fields that the core does not have: their schemas, and what they do."""
