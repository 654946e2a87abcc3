"""What a model is loaded from: its config.json, and the files of its weights.

families         what each model type means by its config.json
rope_parameters  how that describes the rotary embedding
config           ModelConfig: the shape of a model
matrix           Matrix: a weight, as a linear layer takes it
checkpoint       Source: the tensors of a model by name; Checkpoint, those of safetensors files
weights          Weights: the same tensors as the decoder uses them
loader           reads the weights from a source
"""
