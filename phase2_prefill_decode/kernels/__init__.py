"""The operations of the model besides its matrix products: `Backend` holds one implementation of each for a device.

attention   attention of a ragged batch over paged keys and values: interface and reference in plain torch
pointwise   residual sum and RMS norm; q and k norm, rotation and the store of K and V; the gate of the MLP: the same
draw        temperature, filters and the draw of a token: the same
triton      the kernels for a GPU
"""
