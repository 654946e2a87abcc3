"""Linear layers of a CPU: one product of any number of rows with a packed weight, against float64 and bit for bit."""

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from phase2_prefill_decode.extras.cpu import openmp
from phase2_prefill_decode.extras.cpu.backend import packed_linear
from phase2_prefill_decode.extras.cpu.blocks import Blocks, put_rows
from phase2_prefill_decode.extras.cpu.microkernel import SET
from phase2_prefill_decode.extras.cpu.product import ITEM_ROWS, PackedWeight
from phase2_prefill_decode.extras.cpu.rows import quantize
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from tests.phase2_prefill_decode.quantized.checkpoints import in_8_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a last place, relatively
SHAPES = [(96, 64), (64, 1), (1, 2), (1, 1), (65, 33), (130, 1030)]  # [out, in]


def weights(dtype: torch.dtype, out: int = 96, width: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(out + width)
    return (torch.randn(out, width) / width**0.5).to(dtype), torch.randn(out).to(dtype)


def assert_product(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within what a sum of float32, in any order, and the rounding of the result may be off."""
    wide = [rows.double(), weight.double(), bias if bias is None else bias.double()]
    wanted = linear(*wide)
    most = linear(wide[0].abs(), wide[1].abs(), wide[2] if wide[2] is None else wide[2].abs())
    off = (weight.shape[1] + 1) * 2.0**-24 * most
    assert found.dtype == rows.dtype
    assert ((found.double() - wanted).abs() <= off + ULP[rows.dtype] * (wanted.abs() + off) + 2.0**-25).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 6, 33, ITEM_ROWS + 1])
@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_is_that_of_float64(dtype: torch.dtype, out: int, width: int, tokens: int, biased: bool) -> None:
    weight, bias = weights(dtype, out, width)
    rows, given_bias = torch.randn(tokens, width).to(dtype), bias if biased else None
    assert_product(packed_linear(weight, given_bias)(rows), rows, weight, given_bias)


@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_weight_has_the_rows_of_an_embedding(dtype: torch.dtype, out: int, width: int) -> None:
    """However many of them are packed at a time."""
    weight, _ = weights(dtype, out, width)
    packed, tokens = PackedWeight(weight[:37], outputs=out), torch.randint(0, out, (50,))
    for rows in torch.split(weight[37:], 20):
        packed.add(rows)
    assert torch.equal(packed.rows(tokens, dtype), weight[tokens])
    rows = torch.randn(3, width).to(dtype)
    assert torch.equal(packed(rows), PackedWeight(weight)(rows))
    for outside in (-1, out):
        with pytest.raises(IndexError, match="not in the vocabulary"):
            packed.rows(torch.tensor([0, outside]), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
def test_a_block_holds_each_input_for_all_its_outputs(dtype: torch.dtype) -> None:
    """However its rows are added; the outputs and inputs that are missing are zeros."""
    matrix, together = (torch.arange(2800) % 128 + 1).view(70, 40).to(dtype), 2 if dtype == torch.bfloat16 else 1
    blocks = Blocks(70, 42, dtype)
    for rows in torch.split(matrix, 33):
        blocks.add(rows)
    assert (blocks.tensor.shape, blocks.tensor.is_contiguous()) == ((2, 42 // together, 64), True)
    numbers = blocks.tensor.view(dtype).view(2, 42 // together, 64, together)
    for output, row in enumerate(matrix):
        held = [numbers[output // 64, i // together, output % 64, i % together] for i in range(40)]
        assert torch.equal(torch.stack(held), row)
    assert int((numbers != 0).sum()) == matrix.numel()


def test_rows_are_put_into_the_lines_of_blocks() -> None:
    """From an output in the middle of a block on, and but for the units that are done."""
    rows = np.arange(1, 31, dtype=np.uint32).reshape(5, 6)
    blocks, wanted = np.zeros((2, 2, 6, 64), np.uint32)
    put_rows.py_func(rows, blocks, 62, 2)  # without compilation
    for row in range(5):
        wanted[(62 + row) // 64, 2:, (62 + row) % 64] = rows[row, 2:]
    assert np.array_equal(blocks, wanted)


STORED = torch.int8, torch.uint8, torch.float8_e4m3fn


def quantized(stored: torch.dtype, dtype: torch.dtype, out: int, width: int, groups: int = 1) -> QuantizedWeight:
    """Random numbers, with all that the format has."""
    values = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8)
    if stored != torch.uint8:
        values = (torch.randn(out, width) * 50).clamp(-128, 127).to(stored)
    return QuantizedWeight(values=values, scales=(torch.rand(out, groups) / 10).to(dtype), dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([None, *STORED]),
    shape=st.sampled_from(SHAPES),
    cuts=st.lists(st.integers(0, 2 * ITEM_ROWS + 5), max_size=6),
    threads=st.integers(1, 3),
)
def test_a_row_is_the_same_alone_and_in_any_batch(
    dtype: torch.dtype, stored: torch.dtype | None, shape: tuple[int, int], cuts: list[int], threads: int
) -> None:
    """Bit for bit, on any number of threads, whatever the other rows hold."""
    out, width = shape if stored != torch.uint8 else (shape[0], shape[1] + shape[1] % 2)
    weight, bias = weights(dtype, out, width)
    before = torch.get_num_threads()
    product = packed_linear(weight if stored is None else quantized(stored, dtype, out, width), bias)
    rows = torch.randn(2 * ITEM_ROWS + 5, width).to(dtype)
    ends = [0, *sorted(cuts), len(rows)]
    try:
        torch.set_num_threads(threads)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(openmp, "LITTLE", 0)
            whole = product(rows)
            parts = torch.cat([product(rows[start:end]) for start, end in pairwise(ends)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(parts, whole)
    row = len(rows) // 2
    others = torch.full_like(rows, torch.nan)
    others[row] = rows[row]
    assert torch.equal(product(others)[row], whole[row])


# [out, in], inputs of a group, and what the weight has besides scales.
QUANTIZED = [((100, 128), 32, ""), ((100, 128), 128, "zeros"), ((70, 96), 2, "offsets"), ((65, 512), 256, "order"),
             ((65, 96), 3, ""), ((70, 130), 130, "zeros"), ((64, 24), 12, "offsets")]  # fmt: skip


@pytest.mark.parametrize(("shape", "group", "besides"), QUANTIZED)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_quantized_weight_is_multiplied_as_it_is(
    dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, int], group: int, besides: str
) -> None:
    """Its product is that of the float64 that its numbers and scales stand for, with rows in 8 bits if it holds
    integers, and near that with the rows as they are."""
    torch.manual_seed(0)
    (out, width), groups = shape, shape[1] // group
    others = {
        "zeros": torch.randint(0, 16, (out, groups)).to(dtype),
        "offsets": torch.rand(out, groups).to(dtype),
        "order": torch.randperm(width),
    }
    given = {besides: others[besides]} if besides else {}
    weight = replace(quantized(stored, dtype, out, width, groups), **given)
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    wide = replace(weight, scales=weight.scales.double(), dtype=torch.float64, **exact).dequantize()
    bias, rows = torch.randn(out).to(dtype), torch.randn(ITEM_ROWS + 5, width).to(dtype)
    product = packed_linear(weight, bias)
    order = others["order"] if besides == "order" else torch.arange(width)
    taken = rows[:, order].double() if stored.is_floating_point else in_8_bits(rows[:, order], group)
    found, wanted = product(rows), linear(taken, wide[:, order], bias.double())
    assert (found.double() - wanted).norm() < (2 * ULP[dtype] + 1e-6) * wanted.norm()
    plain = linear(rows.double(), wide, bias.double())
    assert (found.double() - plain).norm() < (2 * ULP[dtype] + 0.01) * plain.norm()
    assert torch.equal(torch.cat([product(row[None]) for row in rows]), found)
    tokens = torch.tensor([out - 1, 0, out // 2])
    looked_up = product.rows(tokens, dtype).double()
    assert (looked_up - wide[tokens]).norm() < (2 * ULP[dtype] + 1e-6) * wide[tokens].norm()
    dequantized = stored.is_floating_point and besides in ("zeros", "offsets")
    kept = {torch.uint8: "4 bits"}.get(stored, str(stored).removeprefix("torch."))
    assert product.kernel.startswith(kept) != dequantized


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_scales_of_16_bits_stay_so_and_the_product_is_the_same_bit_for_bit(stored: torch.dtype, groups: int) -> None:
    torch.manual_seed(0)
    wide = quantized(stored, torch.float32, 70, 32 * groups, groups)
    wide = replace(wide, scales=wide.scales.half().float())
    narrow, rows = replace(wide, file_scales=torch.float16), torch.randn(9, 32 * groups)
    products = [packed_linear(weight) for weight in (wide, narrow)]
    assert torch.equal(products[0](rows), products[1](rows))
    assert torch.equal(*(product.rows(torch.arange(70), torch.float32) for product in products))
    sizes = [product._blocks[0].tensor.nbytes for product in products]
    assert sizes[0] - sizes[1] == 128 * 4 * (groups // 2)  # of 128 outputs, which are two blocks


@pytest.mark.parametrize(
    ("number", "stored"),
    [(-128, torch.int8), (127, torch.int8), (-32, torch.int8), (31, torch.int8), (0, torch.uint8), (255, torch.uint8)],
)
@pytest.mark.parametrize("width", [1024, 130])
def test_the_largest_integers_do_not_overflow(number: int, stored: torch.dtype, width: int) -> None:
    values = torch.full((3, width // 2 if stored == torch.uint8 else width), number, dtype=stored)
    weight = QuantizedWeight(values=values, scales=torch.full((3, 1), 0.5), dtype=torch.float32)
    rows = torch.tensor([[1.0], [-1.0], [3e38]]).expand(3, width) / torch.tensor([[1.0], [1.0], [1e5]])
    wanted = rows.double() @ weight.dequantize().double().T
    torch.testing.assert_close(packed_linear(weight)(rows).double(), wanted, rtol=1e-6, atol=0)


@numba.njit
def in_integers(x: np.ndarray, numbers: np.ndarray) -> tuple[float, int]:
    return quantize(x, numbers)


def test_a_row_is_rounded_to_the_nearest_integers() -> None:
    x, numbers = np.array([0.5, -3.0, 1.0, 0.011, -0.012, 0.0], np.float32), np.zeros(6, np.int8)
    scale, total = in_integers(x, numbers)
    assert numbers.tolist() == np.rint(x / (3 / 127)).tolist() == [21, -127, 42, 0, -1, 0]
    assert (scale, total) == (np.float32(3) / np.float32(127), -65)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_rows_that_8_bits_cannot_hold_are_not_finite_and_those_of_zeros_are_zero(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    """Whatever the other rows are. Numbers below 2 ** -100 are rounded as if the largest were that."""
    rows, bias = torch.randn(6, 256).to(dtype), torch.randn(96).to(dtype)
    rows[1], rows[4] = 0, 1e-40
    rows[2, 200], rows[3, 7] = torch.nan, -torch.inf
    product = packed_linear(quantized(stored, dtype, 96, 256, 2), bias)
    found = product(rows)
    assert found[2:4].isnan().all()
    assert torch.equal(found[[1, 4]], bias.expand(2, -1))
    assert torch.equal(found[[0, 5]], product(rows[[0, 5]]))
    assert found[[0, 5]].isfinite().all()


def test_a_weight_of_float8_holds_nan_and_numbers_of_every_size() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    product = packed_linear(QuantizedWeight(values=values[:, None], scales=torch.ones(256, 1)))
    assert torch.equal(product(torch.ones(1, 1).bfloat16())[0].nan_to_num(1e9), values.bfloat16().nan_to_num(1e9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 33])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, width: int) -> None:
    weight, bias = weights(dtype, 96, width)
    rows = torch.randn(9, width).to(dtype)
    rows[1, 3], rows[2, -1], rows[3, 0], weight[5, 7], bias[6] = torch.nan, torch.inf, -torch.inf, torch.inf, torch.nan
    found, wanted = packed_linear(weight, bias)(rows), linear(rows.double(), weight.double(), bias.double())
    finite = wanted.isfinite()
    assert torch.equal(found.double().nan_to_num()[~finite], wanted.to(dtype).double().nan_to_num()[~finite])
    assert found[finite].isfinite().all()


def test_rows_may_be_a_view() -> None:
    weight, _ = weights(torch.bfloat16)
    rows = torch.randn(6, 128).bfloat16()[::2, 32:96]
    product = packed_linear(weight)
    assert torch.equal(product(rows), product(rows.contiguous()))


def test_a_packed_weight_is_a_copy_and_the_original_is_freed() -> None:
    weight, _ = weights(torch.bfloat16)
    product, rows = packed_linear(weight), torch.randn(3, 64).bfloat16()
    before = product(rows)
    weight.zero_()
    assert torch.equal(product(rows), before)
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("processor", "features", "name"),
    [
        ("haswell", "+avx2,+fma", "AVX2"),
        ("alderlake", "+avx2,+fma,+avxvnni", "AVX2"),
        ("skylake-avx512", "+avx2,+fma,+avx512f,+avx512bw", "AVX-512"),
    ],
)
def test_every_instruction_set_has_the_same_product(processor: str, features: str, name: str, tmp_path: Path) -> None:
    """In a process where numba compiles for another processor. Sums are the same chains, or exact: the same bits."""
    if os.environ.get("NUMBA_CPU_NAME"):
        pytest.skip("numba already compiles for another processor")
    flags = Path("/proc/cpuinfo").read_text().replace("avx_vnni", "avxvnni") if Path("/proc/cpuinfo").exists() else ""
    if any(flag not in flags for flag in features.replace("+", "").split(",")):
        pytest.skip(f"this processor has no {name}")
    torch.manual_seed(0)
    given: dict[str, tuple[Tensor, Tensor | QuantizedWeight, Tensor | None]] = {}
    for dtype in DTYPES:
        rows, weight, bias = torch.randn(23, 131).to(dtype), torch.randn(130, 131).to(dtype) / 8, torch.randn(130)
        given[str(dtype)] = rows, weight, bias.to(dtype)
    for stored in STORED:
        made, rows = quantized(stored, torch.bfloat16, 130, 160, 5), torch.randn(23, 160).bfloat16()
        given[str(stored)] = rows, made, None
        if not stored.is_floating_point:  # with offsets, and of 8 bits some that would fit into 6
            small = made.values if stored == torch.uint8 else made.values >> 2
            given[f"{stored} with offsets"] = rows, replace(made, values=small, offsets=made.scales * 7), None
    torch.save(given, tmp_path / "given.pt")
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-c", ELSEWHERE, tmp_path]
    found = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == name, found.stderr
    results = torch.load(tmp_path / "results.pt")
    for key, (rows, matrix, bias) in given.items():
        assert torch.equal(results[key], packed_linear(matrix, bias)(rows)), (key, SET)
        if isinstance(matrix, Tensor):
            assert_product(results[key], rows, matrix, bias)


ROOT = Path(__file__).parents[2]
ELSEWHERE = """
import sys, torch
from pathlib import Path
from phase2_prefill_decode.extras.cpu.microkernel import SET
from phase2_prefill_decode.extras.cpu.backend import packed_linear
folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt", weights_only=False)
results = {key: packed_linear(weight, bias)(rows) for key, (rows, weight, bias) in given.items()}
torch.save(results, folder / "results.pt")
print(SET)
"""


@pytest.mark.slow
def test_the_tiles_compile_for_arm(tmp_path: Path) -> None:
    """What numba makes for vectors of 128 bits, LLVM makes with NEON: multiply-adds of vectors, and no calls."""
    elsewhere = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+fma,+f16c", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **elsewhere, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", FOR_ARM], env=environment, capture_output=True, text=True)
    counts = [line.split() for line in made.stdout.splitlines()]
    assert {kind for kind, *_ in counts} == {"float32", "int16", "uint16", "int8", "uint8", "uint64"}, made.stderr
    assert all(int(multiplied) > 100 and int(calls) == 0 for _, multiplied, calls in counts), counts


FOR_ARM = """
import re
import llvmlite.binding as llvm
import torch
from phase2_prefill_decode.extras.cpu.product import add_rows
from tests.phase2_prefill_decode.test_linear import DTYPES, STORED, packed_linear, quantized

plain = [torch.zeros(64, 64, dtype=dtype) for dtype in DTYPES]
for weight in plain + [quantized(stored, torch.bfloat16, 64, 64) for stored in STORED]:
    packed_linear(weight)(torch.zeros(1, 64, dtype=weight.dtype))
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
arm = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
for (kind, *_), code in add_rows.inspect_llvm().items():
    module = llvm.parse_assembly(re.sub('target (triple|datalayout) = ".*"|"target-(cpu|features)"="[^"]*"', "", code))
    module.triple, module.data_layout = arm.triple, str(arm.target_data)
    made = arm.emit_assembly(module)
    print(kind, len(re.findall(r"\\tf?mla\\tv", made)), len(re.findall(r"\\tbl\\t", made)))
"""


def test_rows_and_results_that_do_not_fit_a_weight_are_refused() -> None:
    """Fault: rows of another dtype were read as what they are not, and a result of another shape would be written over
    its end."""
    product, rows = packed_linear(torch.ones(8, 4)), torch.ones(3, 4)
    for wrong, out in (
        (rows.bfloat16(), None),
        (rows[:, :3], None),
        (rows, torch.empty(3, 7)),
        (rows, torch.empty(2, 8)),
    ):
        with pytest.raises(ValueError, match=r"rows of|the result must be"):
            product(wrong, out)
    assert torch.equal(product(rows, torch.empty(3, 8)), torch.full((3, 8), 4.0))
