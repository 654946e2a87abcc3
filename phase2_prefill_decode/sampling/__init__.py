"""What samples: the next token of each request, from the logits of its last token.

inputs       the sampling parameters of a step: packed on the host, read on the device
edits        logit bias and penalties
grammar      compiled grammars
constraints  masks of what a grammar or a list allows
sampler      Sampler: edits, masks and the draw
logprobs     log-probabilities of drawn tokens, prompt tokens and alternatives
"""
