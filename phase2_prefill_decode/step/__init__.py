"""One step, from a batch of slices to its tokens.

packed        a batch as integers on the host, and as tensors on the device
device_state  what stays on the device between steps
graphs        decode steps that are recorded once
runner        ModelRunner: packs a batch, runs the model, samples
"""
