"""Linear: packed, widened or neither, the product is that of float64, to the rounding of its dtype."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

from phase2_prefill_decode import linear as linear_module
from phase2_prefill_decode.linear import SEVERAL, Linear, LinearPath

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def weights(dtype: torch.dtype, out: int = 96, width: int = 64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(out + width)
    return (torch.randn(out, width) / width**0.5).to(dtype), torch.randn(out).to(dtype)


def no_such_operator(*_: object, **__: object) -> Any:
    raise RuntimeError("could not create a primitive descriptor")


WITHOUT = {
    "as it is": None,
    "no operators": SimpleNamespace(),
    "no packing": SimpleNamespace(_linear_pointwise=SimpleNamespace(default=no_such_operator)),
    "refused": SimpleNamespace(_reorder_linear_weight=no_such_operator, _linear_pointwise=torch.ops.mkldnn),
}


@pytest.fixture(params=WITHOUT.values(), ids=WITHOUT.keys())
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch with its private oneDNN operators, and without them in each way in which they may be missing. A widened
    weight has three panels, of which the last is smaller."""
    monkeypatch.setattr(linear_module, "PANEL", 40 * 64 * 4)
    if request.param is not None:
        monkeypatch.setattr(torch.ops, "mkldnn", request.param)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, SEVERAL - 1, SEVERAL, 33, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_is_that_of_float64(dtype: torch.dtype, tokens: int, biased: bool) -> None:
    weight, bias = weights(dtype)
    rows = torch.randn(tokens, 64).to(dtype)
    found = Linear(weight, bias if biased else None)(rows)
    wanted = linear(rows.double(), weight.double(), bias.double() if biased else None)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_may_be_a_view() -> None:
    weight, _ = weights(torch.bfloat16)
    rows = torch.randn(6, 128).bfloat16()[::2, 32:96]
    product = Linear(weight)
    assert torch.equal(product(rows), product(rows.contiguous()))


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [SEVERAL - 1, SEVERAL, 64])
def test_a_row_does_not_depend_on_what_the_others_hold(dtype: torch.dtype, tokens: int) -> None:
    product, rows = Linear(*weights(dtype)), torch.randn(tokens, 64).to(dtype)
    before = product(rows)
    others = torch.full_like(rows, torch.nan)
    others[1] = rows[1]
    assert torch.equal(product(others)[1], before[1])


def test_a_packed_weight_is_a_copy_and_the_original_is_freed() -> None:
    weight, _ = weights(torch.bfloat16)
    product, rows = Linear(weight), torch.randn(3, 64).bfloat16()
    if product.kernel is not LinearPath.PACKED:
        pytest.skip("oneDNN has no bfloat16 on this processor")
    before = product(rows)
    weight.zero_()
    assert torch.equal(product(rows), before)
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


def test_16_bits_are_packed_if_the_processor_multiplies_them_and_widened_if_not() -> None:
    multiplies = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    for dtype, packs in multiplies.items():
        assert Linear(weights(dtype)[0]).kernel is (LinearPath.PACKED if packs else LinearPath.WIDENED)
    assert Linear(weights(torch.float32)[0]).kernel is LinearPath.PLAIN


def test_widening_takes_the_memory_of_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", WITHOUT["no operators"])
    monkeypatch.setattr(linear_module, "PANEL", 64 << 10)
    product, rows = Linear(weights(torch.bfloat16, 4096, 256)[0]), torch.randn(SEVERAL, 256).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        product(rows)
    taken = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(taken) == 64 << 10, "and less for the result, of 48 KiB"
