"""What the model computes over pages, each operation three ways: reference, CPU and Triton.

attention      queries of a ragged batch against the keys and values in pages
add_norm       residual sum and RMS norm
rotate_store   q and k norm, rotary positions, and K and V written to their pages
swiglu         the gate of the MLP
"""
