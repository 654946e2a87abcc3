"""Weights in 8 and 4 bits. Each format is a file, and reads its matrices into the one QuantizedWeight.

weight      QuantizedWeight
quantize    makes one of a matrix in 16 bits
at_load     quantizes the matrices of a model while they are read
layout      Format: of which tensors a checkpoint makes a quantized matrix
gptq, awq, compressed    the formats of safetensors, which `formats` chooses by config.json
checkpoint  a checkpoint in such a format, seen as one of single tensors
ggml        the blocks of llama.cpp's tensors
"""
