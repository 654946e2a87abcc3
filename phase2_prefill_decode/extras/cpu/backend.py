"""The backend of a CPU: kernels that numba compiles."""

from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.extras.cpu.attention import attend
from phase2_prefill_decode.extras.cpu.compilation import compile_decoder
from phase2_prefill_decode.extras.cpu.draw import draw
from phase2_prefill_decode.extras.cpu.forward import whole_step
from phase2_prefill_decode.extras.cpu.linear import packed_linear
from phase2_prefill_decode.extras.cpu.pointwise import add_norm, rotate_store, swiglu

CPU = Backend(attend, add_norm, rotate_store, swiglu, draw, packed_linear, whole_step, compile_decoder)
