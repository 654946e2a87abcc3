"""Kernels compiled ahead of time: their machine code, its analysis, and the report."""

import textwrap
from pathlib import Path

import pytest

from phase1_kv_pool.kernels import prepare_triton
from phase1_kv_pool.lab import report
from phase1_kv_pool.lab.ahead import ARCHITECTURES, Compiled, compile_ahead, read


@pytest.mark.parametrize("all_shapes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_store_kernel_has_no_stack_few_registers_and_wide_accesses(all_shapes: bool) -> None:
    """16 bytes an access, both ways: at least two of K and two of V."""
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
        assert kernel.wide_stores >= (2 if in_8_bits else 4), kernel


BAD = """
    import triton
    import triton.language as tl
    from phase1_kv_pool.lab.ahead import Expect, KernelSpec

    @triton.jit
    def copy(source, to, stride, block: tl.constexpr):
        place = tl.program_id(0) * stride + tl.arange(0, block)
        tl.store(to + place, tl.load(source + place))

    @triton.jit
    def product(a, b, c, steps, tile: tl.constexpr):
        row, column = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
        total = tl.zeros([tile, tile], tl.float32)
        for step in range(steps):
            left = tl.load(a + (row * steps + step) * tile + column)
            right = tl.load(b + (step * tile + row) * tile + column)
            total = tl.dot(left, right, total)
        tl.store(c + row * tile + column, total.to(tl.float16))

    TYPES = {"source": "*bf16", "to": "*bf16", "stride": "i32"}
    WIDE = Expect(wide_loads=True, wide_stores=True)
    DOT = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "steps": "i32"}
    CATALOG = [
        KernelSpec("any stride", copy, TYPES, {"block": 1024}, architectures=(80,), expect=WIDE),
        KernelSpec("stride of sixteens", copy, TYPES, {"block": 1024}, sixteens=("stride",), expect=WIDE),
        KernelSpec("few registers", product, DOT, {"tile": 128}, {"maxnreg": 32, "num_stages": 1}, architectures=(80,)),
        KernelSpec("pipelined", product, DOT, {"tile": 64}, {"num_stages": 3}, ("steps",),
                   expect=Expect(async_copies=True, tensor_cores=True, shared=2 * 2 * 64 * 64 * 2)),
        KernelSpec("too greedy", copy, TYPES, {"block": 1024}, architectures=(90,),
                   expect=Expect(registers=2, shared=1, async_copies=True, tensor_cores=True)),
    ]
"""


def test_every_deviation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a package of kernels, as a later phase has one."""
    folder = tmp_path / "strange_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "catalog.py").write_text(textwrap.dedent(BAD))
    main = "from phase1_kv_pool.lab.report import main\nraise SystemExit(main('strange_kernels', sys.argv[2:]))\n"
    (folder / "__main__.py").write_text(f"import sys\n{main}")
    monkeypatch.syspath_prepend(tmp_path)
    found: dict[str, list[Compiled]] = {}
    for kernel in report.compiled(folder.name):
        found.setdefault(kernel.kernel, []).append(kernel)
    assert {kernel.faults for kernel in found["any stride"]} == {("no wide loads", "no wide stores")}
    assert {kernel.faults for kernel in found["stride of sixteens"]} == {()}
    [spilling] = found["few registers"]
    assert spilling.stack > 0
    assert spilling.faults == (f"{spilling.stack} bytes of stack",)
    for kernel in found["pipelined"]:
        assert kernel.faults == ()
        assert min(kernel.async_copies, kernel.tensor_cores) > 0
        assert kernel.shared >= 32768
    [greedy] = found["too greedy"]
    assert greedy.faults == (
        f"{greedy.registers} registers, at most 2 expected",
        "0 bytes of shared memory, at least 1 expected",
        "no async copies",
        "no tensor cores",
    )


def test_an_interpreted_kernel_cannot_be_compiled() -> None:
    if not prepare_triton():
        pytest.skip("kernels are compiled here, since there is a GPU")
    from phase1_kv_pool.lab.catalog import CATALOG

    with pytest.raises(RuntimeError, match="defined to be interpreted and cannot be compiled"):
        compile_ahead(CATALOG[0], 90)


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
