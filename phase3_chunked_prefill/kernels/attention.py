"""Attention over pages for any mixture of decodes, chunks and prompts.

The reference and the CPU implementation are phase 2's: they take any ragged batch. On a GPU a mixture changes how the
work is spread over programs, so the Triton implementation is this phase's own.
"""

from phase1_kv_pool.kernels.backends import Backends
from phase2_prefill_decode.kernels import attention
from phase2_prefill_decode.kernels.attention import Attend

ATTEND: Backends[Attend] = Backends(
    attention.ATTEND.reference,
    attention.ATTEND.cpu,
    "phase3_chunked_prefill.kernels.triton.ragged:attend",
)
