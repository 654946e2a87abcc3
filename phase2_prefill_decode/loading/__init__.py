"""What loads a model: its config.json, the files of its weights, and the two made into a Model.

families    what each model type means by its config.json
config      ModelConfig: the shape of a model
checkpoint  the tensors of safetensors files
quantized   the formats of quantized weights, brought into one
gguf_config, gguf   the same two of a GGUF file: a config.json from its metadata, and its tensors
weights     the same tensors as the decoder uses them
model       Model: config, decoder and tokenizer of a directory
"""
