"""The operations of the model besides its matrix products. Each has a reference, a CPU and a Triton implementation.

attention   attention of a ragged batch over paged keys and values: interface and reference in plain torch
pointwise   residual sum and RMS norm; q and k norm, rotation and the store of K and V; the gate of the MLP: the same
mask        tokens excluded from sampling by bit masks: the same
draw        temperature, filters and the draw of a token: the same
triton      the kernels for a GPU
cpu         the kernels for a CPU, compiled by numba
"""
