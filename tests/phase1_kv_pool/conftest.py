"""Triton looks at the environment when it is imported, so this comes before any test module imports it."""

from phase1_kv_pool.kernels import prepare_triton

prepare_triton()
