"""What samples: the next token of each request, from the logits of its last token.

processors  what a request may ask for beside a draw: it changes logits before, or collects results after
sampler     Sampler: the parameters of the draws, the work of processors, and the draw
"""
