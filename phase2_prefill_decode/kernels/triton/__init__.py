"""The Triton kernels.

attention   picks the kernel for a batch
decode      few new tokens, many keys: each sequence is split (split-KV, as in FlashDecoding)
splits      the table of splits, made on the device
tuning      the size of a split and the tile, by default or as measured on a device
prefill     many new tokens that share the keys they read
tiles       shared by both: page look-up and one step of the online softmax
pointwise   the operations between the matrix products
draw        temperature, filters and the draw of a token
"""
