"""Ways to be faster that the engine does not take: each is right before it is timed, and takes no other with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phase2_prefill_decode.extras.quantized import triton_product
from phase6_integration.lab.gpu import kernels, levers
from phase6_integration.lab.gpu.rows import Day, Row, Rows


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    """A dry day whose clock runs nothing twice."""
    monkeypatch.setattr(Day, "seconds", lambda _, call, times=10: call() is None or 1.0)
    return Day("levers", True, tmp_path)


def test_each_split_of_int4_multiplies_rightly_and_the_engine_keeps_its_own(
    day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int, int]] = []
    real = triton_product.constants.__wrapped__

    def seen(outputs: int, inputs: int, *rest: Any) -> Any:
        shape, options = real(outputs, inputs, *rest)
        launched.append((inputs // shape["split"], shape["split"] % shape["tile_in"], triton_product.LONGEST_TILE))
        return shape, options

    shipped = {name: getattr(triton_product, name) for name in levers.SIZES}
    assert levers.SPLITS[0] == shipped
    monkeypatch.setattr(triton_product.constants, "__wrapped__", seen)
    for tried in levers.SPLITS:
        levers.by_split(day, 96, 1024, **tried)
    assert [(count, tile) for count, _, tile in launched[::2]] == [(2, 128), (4, 128), (1, 128), (2, 256), (4, 256)]
    assert {rest for _, rest, _ in launched} == {0}, "a tile is in one split"
    assert {name: getattr(triton_product, name) for name in levers.SIZES} == shipped


def test_a_wrong_product_is_not_timed(day: Day) -> None:
    def wrong(weight: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: x @ weight.dequantize().float().t() * 1.1

    with pytest.raises(RuntimeError, match=r"the product is 10\.0% off its reference, and rounding explains 2%"):
        kernels.multiply(day, 96, 64, "int4", 3, wrong)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any) -> Tensor:
    """torch.nn.functional.scaled_mm of an H100, with what torch 2.11 checks and cuBLAS asks for."""
    (rows, inputs), outputs, kinds = a.shape, b.shape[1], torch.nn.functional.ScalingType
    fours = -(-inputs // 128 // 4) * 4
    assert (kind_a, kind_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert (a.stride(1), b.stride(0)) == (1, 1)
    assert (scale_a.shape, scale_a.stride()) == ((rows, inputs // 128), (1, rows))
    assert (scale_b.shape, scale_b.stride()) == ((fours, outputs // 128), (1, fours))
    whole = torch.zeros(rows, outputs)
    for block in range(inputs // 128):
        at = slice(block * 128, block * 128 + 128)
        part = a[:, at].float() @ b[at].float()
        whole += part * scale_a[:, block, None] * scale_b[block].repeat_interleave(128)
    return whole.bfloat16()


@pytest.mark.parametrize("inputs", [512, 640])
def test_a_block_scaled_product_is_called_as_the_library_wants_it(
    day: Day, monkeypatch: pytest.MonkeyPatch, inputs: int
) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    assert levers.block_scaled(day, 256, inputs, 8)["us"] == 1e6


PRODUCTS = ((128, 256),)  # as large as a block of scales


class WholeLists(Day):
    """A dry day that tries every library."""

    def some(self, all: Any, dry: Any) -> Any:
        return all if all in (("default", "cublaslt"), (256, 2048), PRODUCTS) else dry


def test_what_a_library_refuses_is_a_line_and_the_others_are_timed(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fakes: they refuse as another GPU and another build of torch do."""

    def prefer(name: str) -> None:
        if name == "cublaslt":
            raise RuntimeError("Cannot set preferred blas backend to cuBLASLt\nif PyTorch was compiled without it.")

    def refuse(*given: object) -> Row:
        raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    monkeypatch.setattr(levers, "PRODUCTS", PRODUCTS)
    levers.levers(WholeLists("levers", True, day.out))
    rows = Rows(day.out).of("levers")
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {
        "product_128_256_256_cublaslt": (
            "RuntimeError: Cannot set preferred blas backend to cuBLASLt if PyTorch was compiled without it."
        ),
        **dict.fromkeys(
            ("block_scaled_128_256_256", "block_scaled_128_256_2048"),
            "NotImplementedError: DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90",
        ),
    }
    measured = {row["what"] for row in rows.values() if "us" in row}
    assert measured == {"split", "mixed", "product", "int4", "norm_quantized"}


def test_a_library_is_chosen_for_one_product_only_even_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list[str]()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    with pytest.raises(RuntimeError, match="refused"), levers.library_of("cublaslt"):
        raise RuntimeError("refused")
    assert chosen == ["cublaslt", "default"]
