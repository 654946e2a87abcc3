"""Attention over pages for any mixture, three ways.

The first two are phase 2's: a reference and a CPU path that take a batch as it comes. What a mixture changes is how the
work is spread over a GPU.
"""

from phase1_kv_pool.kernels.ways import Ways
from phase2_prefill_decode.kernels import attention
from phase2_prefill_decode.kernels.attention import Attend

ATTEND: Ways[Attend] = Ways(
    attention.ATTEND.reference,
    attention.ATTEND.cpu,
    "phase3_chunked_prefill.kernels.ragged_triton:attend",
)
