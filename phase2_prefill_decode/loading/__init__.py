"""Loading a model from its config.json and the files of its weights.

families         how each model type reads its config.json
rope_parameters  how a config describes the rotary embedding
config           ModelConfig: the shape of a model
matrix           Matrix: a weight, as a linear layer takes it
checkpoint       Source: the tensors of a model by name; Checkpoint, from safetensors files
weights          Weights: the same tensors as the decoder uses them
loader           reads the weights from a source
"""
