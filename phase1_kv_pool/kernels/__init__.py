"""Operations on pages, each written three ways, and what it takes to trust the Triton one without a GPU.

`Ways` holds the three and picks by device, `prepare_triton` has Triton interpret its kernels where no GPU is, and
`ahead` in the lab compiles them for GPUs that are not here. Importing this package does not import Triton.
"""

from phase1_kv_pool.kernels.prepare import prepare_triton
from phase1_kv_pool.kernels.ways import WAYS, Ways, place_to_try

__all__ = ["WAYS", "Ways", "place_to_try", "prepare_triton"]
