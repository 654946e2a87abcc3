"""What samples: the next token of each request, from the logits of its last token.

inputs      the parameters of the draw: packed on the host, read on the device
processors  what a request may ask for beside a draw: it changes logits before, or collects results after
metadata    what the rows of a step ask for
sampler     Sampler: the work of processors, and the draw
"""
