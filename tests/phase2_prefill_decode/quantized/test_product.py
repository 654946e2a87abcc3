"""Products of a GPU with quantized weights, by the interpreter where there is none, against float64."""

from collections.abc import Callable
from itertools import product as cartesian
from typing import Any

import pytest
import torch
from torch import Tensor

from phase2_prefill_decode.extras.linears import products_of
from phase2_prefill_decode.extras.quantized.formats import format_of
from phase2_prefill_decode.extras.quantized.ggml import BLOCKS
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from tests import gguf_files
from tests.gpu.captured import Recorder
from tests.phase1_kv_pool.support import device_of, every_backend_and_dtype, needs_gpu  # before Triton
from tests.phase2_prefill_decode.quantized.test_formats import FORMATS

from phase2_prefill_decode.extras.quantized import triton_product as product  # isort: skip
from phase2_prefill_decode.extras.quantized.triton_product import Float8Product, TritonProduct  # isort: skip

# Half a last place of the dtype, with what the sums in float32 and the scaled 256 of a widened integer may be off.
ERROR = {torch.float32: 2.0**-17, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
GPU = device_of("triton")
STORED = [torch.int8, torch.uint8, torch.float8_e4m3fn]


def quantized(
    stored: torch.dtype, dtype: torch.dtype, shape: tuple[int, int], group: int, besides: str = ""
) -> tuple[QuantizedWeight, Tensor]:
    """A weight with zeros, offsets or an order, and the one in float64 that its numbers stand for."""
    torch.manual_seed(group)
    (out, width), groups = shape, shape[1] // group
    numbers = (torch.randn(out, width) * 50).clamp(-128, 127).to(stored if stored != torch.uint8 else torch.int8)
    values = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8) if stored == torch.uint8 else numbers
    scales = (torch.rand(out, groups) / 10).to(dtype)
    others: dict[str, Tensor] = {
        "zeros": torch.randint(-9, 16, (out, groups)).to(dtype),
        "offsets": torch.rand(out, groups).to(dtype),
        "order": torch.randperm(width),
    }
    given: dict[str, Any] = {besides: others[besides]} if besides else {}
    exact = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    wide = QuantizedWeight(values=values, scales=scales.double(), dtype=torch.float64, **exact).dequantize()
    return QuantizedWeight(values=values, scales=scales, dtype=dtype, **given).to(GPU), wide


def assert_product(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    wanted = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert found.dtype == rows.dtype
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted).norm() <= 2 * ERROR[rows.dtype] * wanted.norm()


# [out, in], inputs of a group, and what the weight has besides scales. Edges of tiles, odd sizes, several splits.
SHAPES = [((100, 128), 32, ""), ((130, 128), 128, "zeros"), ((70, 96), 2, "offsets"), ((65, 1088), 64, "order"),
          ((65, 96), 3, ""), ((3, 1030), 1030, "zeros"), ((40, 32), 32, "")]  # fmt: skip


@pytest.mark.parametrize("rows", [0, 3, 100, product.MANY + 1])
@pytest.mark.parametrize(("shape", "group", "besides"), SHAPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("backend", "dtype"), [p for p in every_backend_and_dtype() if p.values[0] == "triton"])
def test_the_product_is_that_of_float64(
    backend: str, dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, int], group: int, besides: str, rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(product, "WIDENED", 64)  # outputs, so that some of these weights are several blocks
    weight, wide = quantized(stored, dtype, shape, group, besides)
    x, bias = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    assert_product(TritonProduct(weight, bias.to(GPU))(x.to(GPU)), x, wide, bias)


@pytest.mark.skipif(GPU.type == "cpu", reason="a Linear of a CPU has another product; tests/gpu runs this")
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_linear_of_a_gpu_multiplies_with_the_weight_as_it_is_stored(stored: torch.dtype) -> None:
    """Also beside one that is not quantized in the same way: their results are side by side."""
    (weight, wide), (other, wide_other) = (quantized(stored, torch.float16, (48, 64), group) for group in (64, 32))
    x, bias = torch.randn(5, 64).half(), torch.randn(96).half()
    both = product.linear((weight, other), bias.to(GPU))
    assert (len(products_of(both)), both.kernel) == (2, f"{product.KINDS[stored]}, widened by Triton")
    assert_product(both(x.to(GPU)), x, torch.cat((wide, wide_other)), bias)
    result = x.new_empty(5, 48).to(GPU)
    assert product.linear(weight)(x.to(GPU), result) is result
    assert_product(result, x, wide)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_row_is_the_same_alone_and_among_others(stored: torch.dtype) -> None:
    """Bit for bit, in a tile of few rows or of many; above MANY torch multiplies. The interpreter multiplies with
    NumPy, whose sums differ between tiles of 16 bits: there in float32."""
    weight, _ = quantized(stored, torch.float32 if GPU.type == "cpu" else torch.bfloat16, (5, 1088), 64)
    multiply, x = TritonProduct(weight), torch.randn(product.MANY, 1088).to(GPU, weight.dtype)
    assert product.split_of(5, 1088) < 1088
    whole = multiply(x)
    for count in (1, 17, 65):
        assert torch.equal(multiply(x[:count]), whole[:count]), count
    x[1:] = torch.nan
    assert torch.equal(multiply(x)[0], whole[0])


@pytest.mark.parametrize("rows", [20, product.MANY + 1])
def test_nan_stays_what_it_is_and_the_smallest_float8_is_not_lost(rows: int) -> None:
    weight, wide = quantized(torch.float8_e4m3fn, torch.float32, (40, 64), 64)
    weight.values.view(torch.uint8)[5, 7], wide[5, 7] = 0x7F, torch.nan
    weight.values.view(torch.uint8)[6, 7], wide[6, 7] = 0x01, 2.0**-9 * weight.scales[6, 0].item()  # the smallest
    x = torch.eye(64).repeat(5, 1)[:rows]
    x[2, 3] = torch.nan
    found, wanted = TritonProduct(weight)(x.to(GPU)).cpu(), x.double() @ wide.t()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0, equal_nan=True)


def of_format(name: str) -> tuple[QuantizedWeight, Tensor]:
    """A weight as it is read from a checkpoint's tensors, and what the format's library makes of these."""
    make, config = FORMATS[name]()
    parts, dequantized = make(torch.randn(72, 96) / 10)
    format = format_of(config)
    return format.read({suffix: parts[suffix] for suffix in format.parts(72, 96) if suffix in parts}), dequantized


def of_blocks(kind: int) -> tuple[QuantizedWeight, Tensor]:
    blocks = gguf_files.encoded((torch.randn(72, 512) / 20).numpy(), BLOCKS[kind].name)
    weight = BLOCKS[kind].read(torch.from_numpy(blocks.copy()).view(72, -1, BLOCKS[kind].bytes))
    return weight, gguf_files.dequantized(blocks, BLOCKS[kind].name)


LIBRARIES: dict[str, Callable[[], tuple[QuantizedWeight, Tensor]]] = {
    **{name: lambda name=name: of_format(name) for name in FORMATS},  # type: ignore[misc]
    **{block.name: lambda kind=kind: of_blocks(kind) for kind, block in BLOCKS.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_product_is_that_of_the_weight_of_the_library(name: str) -> None:
    """The library rounds the numbers to the dtype of the scales; the kernel does not."""
    torch.manual_seed(0)
    weight, dequantized = LIBRARIES[name]()
    x = torch.randn(9, weight.shape[1])
    found, wanted = TritonProduct(weight.to(GPU))(x.to(GPU)).cpu(), x.double() @ dequantized.double().t()
    assert (found - wanted).norm() <= ERROR[weight.scales.dtype] * wanted.norm()


def test_a_recorded_product_reads_its_rows_anew_and_nothing_else() -> None:
    weight, wide = quantized(torch.uint8, torch.float32, (65, 1088), 64, "order")
    multiply, x = TritonProduct(weight.to("cpu")), torch.randn(3, 1088)
    if GPU.type == "cuda":
        pytest.skip("kernels are compiled where there is a GPU; its own graphs record them in tests/gpu")
    replay = Recorder()(lambda: multiply(x))
    x.copy_(torch.randn(3, 1088))
    assert_product(replay(), x, wide)


def test_splits_follow_from_the_shape_and_every_number_of_rows_is_compiled_before_it_is_served() -> None:
    for outputs, inputs in ((4096, 4096), (4096, 12288), (24576, 4096), (152064, 4096), (64, 96), (5, 151936)):
        split = product.split_of(outputs, inputs)
        programs = -(-outputs // 64) * -(-inputs // split)
        assert split % product.LONGEST_TILE == 0
        assert programs <= max(product.PROGRAMS, -(-outputs // 64))
        assert split >= min(product.SHORTEST, inputs)
    for kind, size in cartesian(product.KINDS.values(), (2, 4)):
        served = {str(product.constants(4096, 4096, 32, kind, rows, size)) for rows in range(1, product.MANY + 1)}
        assert served == {str(product.constants(4096, 4096, 32, kind, rows, size)) for rows in TritonProduct.ROWS[:-1]}
    assert TritonProduct.ROWS[-1] > product.MANY


def test_rows_and_results_that_do_not_fit_a_weight_are_refused() -> None:
    multiply = TritonProduct(quantized(torch.int8, torch.float32, (8, 32), 32)[0])
    rows = torch.ones(3, 32, device=GPU)
    for wrong, out in ((rows[:, :31], None), (rows, rows.new_empty(3, 7)), (rows, rows.new_empty(8, 3).t())):
        with pytest.raises(ValueError, match=r"rows of 31|the result must be"):
            multiply(wrong, out)


# float8 on both sides.


def float8_rows(x: Tensor) -> Tensor:
    """In float64, each row rounded to float8 with its own scale."""
    scales = x.double().abs().amax(1, keepdim=True) / 448
    scales[scales == 0] = 1
    return (x.double() / scales).to(torch.float8_e4m3fn).double() * scales


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rounded", [False, pytest.param(True, marks=[pytest.mark.gpu, needs_gpu])])
def test_many_rows_are_quantized_too_where_torch_multiplies_float8(rounded: bool, biased: bool) -> None:
    """torch has the operator on a CPU too. The interpreter rounds 1.99 to 1 in float8: there the rows are such numbers,
    times a scale."""
    weight, wide = quantized(torch.float8_e4m3fn, torch.bfloat16, (96, 64), 64)
    bias = torch.randn(96).bfloat16() if biased else None
    multiply = Float8Product(weight, None if bias is None else bias.to(GPU))
    x = torch.randn(product.FEW + 1, 64) * 100
    x[:, 5], x[3] = 448, 0
    x = (x if rounded else x.to(torch.float8_e4m3fn).float()) * 2.0 ** torch.linspace(-64, 64, len(x)).round()[:, None]
    x = x.bfloat16()
    found, wanted = multiply(x.to(GPU)).cpu().double(), float8_rows(x) @ wide.t()
    wanted += 0 if bias is None else bias.double()
    assert ((found - wanted).norm(dim=1) <= 2**-7 * wanted.norm(dim=1)).all()


FP8, PLAIN = (torch.float8_e4m3fn, torch.bfloat16, (32, 64), 64), ""


@pytest.mark.parametrize(
    ("weight", "capability", "serves"),
    [
        ((*FP8, PLAIN), (8, 9), True),
        ((*FP8, PLAIN), (8, 0), False),
        ((*FP8, "zeros"), (9, 0), False),
        ((torch.float8_e4m3fn, torch.bfloat16, (32, 64), 32, PLAIN), (9, 0), False),
        ((torch.float8_e4m3fn, torch.float16, (32, 64), 64, PLAIN), (9, 0), False),
        ((torch.float8_e4m3fn, torch.bfloat16, (30, 64), 64, PLAIN), (9, 0), False),
        ((torch.int8, torch.bfloat16, (32, 64), 64, PLAIN), (9, 0), False),
    ],
)
def test_which_products_are_of_float8(weight: Any, capability: tuple[int, int], serves: bool) -> None:
    """bfloat16 rows and a scale for each output, on GPUs that multiply float8."""
    assert Float8Product.serves(quantized(*weight)[0], capability) == serves


@pytest.mark.gpu
@needs_gpu
def test_few_rows_of_float8_stay_in_16_bits() -> None:
    weight, wide = quantized(torch.float8_e4m3fn, torch.bfloat16, (96, 64), 64)
    x = torch.randn(product.FEW, 64).bfloat16()
    assert_product(Float8Product(weight)(x.to(GPU)), x, wide)
