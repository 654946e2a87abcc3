"""The fields of requests and answers that the core does not have: their schemas, and what they do."""
