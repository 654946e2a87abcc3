"""Phase 2, computing: the decoder over pages, attention and its kernels, the sampler, the cost model. Not yet built."""
