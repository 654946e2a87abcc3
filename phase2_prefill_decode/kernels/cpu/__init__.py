"""The CPU kernels: Python compiled to machine code by numba.

attention    plans the work of a batch and runs it on all threads
decode       a tile of few rows: dot products, row by row
prefill      a tile of many rows: two matrix products with an online softmax between them
pointwise    the operations between the matrix products
draw         temperature, filters and the draw of a token
forward      all layers of a small model in one call, for a decode of few tokens; it uses the functions of the others
tiles        shared by decode and prefill: a tile, and how its keys and values are loaded
matmul       a product of small matrices, with the sums in registers
matvec       a product of few rows with a weight, at the speed of memory
intrinsics   pointers, 16-bit floats and exp2, which numba lacks
openmp       runs a compiled function on torch's own threads
cache        keeps compiled code on disk
compilation  compiles the kernels of a model before it is used, on all cores
"""

import sys
import warnings


def _import_numba() -> None:
    """Import numba so that it never reads `.numba_config.yaml`. It takes that file from the working directory, also
    before each compilation: one in a model's folder could turn compilation off."""
    yaml = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]  # without it, numba has no files of settings
    try:
        with warnings.catch_warnings(action="ignore"):  # says so, if there is such a file
            from numba.core import config
    finally:
        del sys.modules["yaml"]
        if yaml is not None:
            sys.modules["yaml"] = yaml
    config._config_fname = ""


_import_numba()
