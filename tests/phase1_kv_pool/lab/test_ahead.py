"""Kernels compiled ahead of time: their machine code, its analysis, and the report."""

import pytest

from phase1_kv_pool.lab import report
from phase1_kv_pool.lab.ahead import ARCHITECTURES, read


@pytest.mark.parametrize("all_shapes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_store_kernel_has_no_stack_few_registers_and_wide_accesses(all_shapes: bool) -> None:
    """16 bytes an access, at least two of K and two of V: both ways, but half of a head in 8 bits is stored in less."""
    compiled = report.compiled("phase1_kv_pool.lab", *(["--all"] if all_shapes else []))
    assert {kernel.architecture for kernel in compiled if kernel.kernel == "store bf16 x 128"} == set(ARCHITECTURES)
    assert {kernel.kernel for kernel in compiled} > {f"store bf16 x {dim}" for dim in (64, 80, 96, 128, 256)}
    assert {kernel.kernel.split()[1] for kernel in compiled} == {"bf16", "fp16", "fp32"}
    for kernel in compiled:
        assert not kernel.faults, kernel
        assert kernel.stack == 0, kernel
        in_8_bits = ", " in kernel.kernel
        assert 0 < kernel.registers <= (64 if in_8_bits else 40), kernel
        assert kernel.wide_loads >= 4, kernel
        assert kernel.wide_stores >= (0 if in_8_bits else 4), kernel


LISTING = """
Resource usage:
 Function store_kernel:
  REG:32 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
        /*0000*/  @P0  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/       LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/       LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64] ;
        /*0030*/       LDG.E.64 R4, desc[UR4][R128.64] ;
        /*0040*/       STG.E.EF.128 desc[UR4][R2.64], R4 ;
        /*0050*/       STG.E.U16 desc[UR4][R2.128], R4 ;
        /*0060*/       LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;
        /*0070*/       UTMALDG.2D [UR8], [UR4] ;
        /*0080*/       HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0090*/       HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;
        /*00a0*/       UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
"""


def test_instruction_counts_of_a_listing() -> None:
    counts = {"wide_loads": 3, "wide_stores": 1, "async_copies": 2, "tensor_cores": 3}
    assert read(LISTING) == {"registers": 32, "stack": 8, **counts}
    with pytest.raises(RuntimeError, match="one kernel expected in the listing, 2 found"):
        read(LISTING * 2)
