"""The Triton kernels.

attention   runs each sequence on the kernel that suits it
plan        assigns the sequences of a step to kernels, and cuts prompts and chunks into blocks
decode      few new tokens, many keys: each sequence is split (split-KV, as in FlashDecoding)
splits      the table of splits, made on the device
tuning      the size of a split
prefill     prompts and chunks: many new tokens that share the keys they read
tiles       shared by both: the walk over keys and values, with one step of the online softmax for each tile
pointwise   the operations between the matrix products
mask        tokens excluded from sampling by bit masks
draw        temperature, filters and the draw of a token
"""
