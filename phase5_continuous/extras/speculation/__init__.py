"""Speculative decoding: drafts of the next tokens, which a step verifies beside the newest one.

ngram        drafts from the request's own text: what followed the last time
suffix       drafts from the outputs of other requests, too
draft_model  drafts by a smaller model
speculation  Speculation: which requests of a step get a draft, and how long
"""
