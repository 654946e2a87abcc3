"""Every implementation of the store, over its edge cases, against an oracle that sees the pool as a row of slots."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phase1_kv_pool.lab.store import store_of
from phase1_kv_pool.layer import KVLayer
from tests.phase1_kv_pool.support import (
    bits,
    device_of,
    every_backend,
    every_backend_and_dtype,
    pages_and_slots,
    skip_float8,
    stored,
)


@dataclass(frozen=True)
class Case:
    """A pool filled with NaN, and the slots to store tokens in."""

    slots: list[int]
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    pages: int = 5
    slot_dtype: torch.dtype = torch.int64

    def run(self, backend: str, dtype: torch.dtype, fused: str = "") -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values as they are after the store, and as they must be. What `fused` names is a view of q, k, v.

        The letters in `fused` name the inputs that are views of one q, k, v tensor. Otherwise K is contiguous, and V
        has its heads first in memory.
        """
        torch.manual_seed(len(self.slots))
        device = device_of(backend)
        shape = self.pages, self.kv_heads, self.page_size, self.head_dim
        keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv")
        q_and_kv = torch.randn(len(self.slots), 5 * self.kv_heads, self.head_dim).to(device, dtype)
        k, v = q_and_kv[:, -2 * self.kv_heads : -self.kv_heads], q_and_kv[:, -self.kv_heads :]
        k = k if "k" in fused else k.contiguous()
        v = v if "v" in fused else v.transpose(0, 1).contiguous().transpose(0, 1)
        slots = torch.tensor(self.slots, dtype=self.slot_dtype, device=device)
        store_of(backend)(KVLayer(keys, values), slots, k, v)
        return [keys, values], [stored(side.cpu(), self.slots, self.pages, self.page_size) for side in (k, v)]


def different(found: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """Where the pool is not as it must be: at most the first place in keys and in values."""
    return [
        f"{name} of page {page}, head {head}, offset {offset}, number {at}: "
        f"expected {right[page, head, offset, at]:.4f}, got {got[page, head, offset, at]:.4f}"
        + (" (was a token with slot -1 stored?)" if right[page, head, offset, at].isnan() else "")
        for name, got, right in zip(("keys", "values"), found, wanted, strict=True)
        for page, head, offset, at in (bits(got) != bits(right)).nonzero()[:1].tolist()
    ]


EDGES = {
    "one_token": Case([37]),
    "first_and_last_slot": Case([79, 0]),
    "one_short_of_a_page": Case(list(range(15))),
    "a_page": Case(list(range(16))),
    "one_past_a_page": Case(list(range(17))),
    "pages_out_of_order": Case([*range(64, 80), *range(16), *range(32, 40)]),
    "neighbours_swapped": Case([18, 17, 16, 19, 1, 0]),
    "padding_first": Case([-1, -1, 5, 6]),
    "padding_between": Case([5, -1, 6, -1, 40]),
    "padding_last": Case([70, 3, *[-1] * 40]),
    "only_padding": Case([-1] * 20),
    "no_token": Case([]),
    "pages_of_one": Case([4, 1, 0], page_size=1),
    "pages_of_five": Case([24, 5, 4, -1, 12], page_size=5),
    "pages_of_64": Case([*range(60, 70), 319], page_size=64),
    "32_bit_slots": Case([33, -1, 2], slot_dtype=torch.int32),
    **{f"heads_of_{n}": Case([20, 3, -1], head_dim=n) for n in (8, 72, 80, 96, 128, 256)},
    **{f"{n}_heads": Case([20, 3, -1], kv_heads=n) for n in (1, 3, 4, 8)},
}


@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_tokens_are_stored_in_their_slots_and_nothing_else_changes(
    backend: str, dtype: torch.dtype, case: Case
) -> None:
    found, wanted = case.run(backend, dtype)
    assert not (wrong := different(found, wanted)), f"slots {case.slots}: wrong afterwards are {wrong}"


@pytest.mark.proof
@pytest.mark.parametrize("fused", ["k", "v", "kv"])
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_views_of_a_fused_projection_are_read_in_place(backend: str, dtype: torch.dtype, fused: str) -> None:
    found, wanted = Case([40, -1, 3, 4, 5], kv_heads=2, head_dim=80).run(backend, dtype, fused)
    assert not (wrong := different(found, wanted)), f"views of a larger tensor: wrong afterwards are {wrong}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pages, page_size, slots = draw(pages_and_slots())
    heads, dim = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 5))
    return Case(slots, heads, dim, page_size, pages, draw(st.sampled_from([torch.int32, torch.int64])))


@pytest.mark.parametrize("backend", every_backend())
@settings(max_examples=60)
@given(case=cases(), fused=st.sampled_from(["", "k", "v", "kv"]))
def test_any_slots_in_any_pool(backend: str, case: Case, fused: str) -> None:
    found, wanted = case.run(backend, torch.float32, fused)
    assert not (wrong := different(found, wanted)), f"slots {case.slots}: wrong afterwards are {wrong}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", every_backend())
def test_in_8_bits_each_head_of_a_token_has_a_scale(backend: str, dtype: torch.dtype) -> None:
    """It is at most half a step away from what was stored. Steps of float8 grow with the number."""
    skip_float8(backend, dtype)
    device, highest = device_of(backend), 127 if dtype == torch.int8 else 448
    sizes = torch.tensor([1e-3, 1, 40, 0, 1], device=device)
    k = (torch.randn(5, 2, 72, device=device) * sizes[:, None, None]).bfloat16()
    pool, slots = torch.full((3, 2, 4, 72), 7.0, device=device).to(dtype), torch.tensor([9, 2, 0, -1, 4], device=device)
    kv = KVLayer(pool.clone(), pool.clone(), *torch.full((2, 3, 2, 4), 0.5, device=device))
    store_of(backend)(kv, slots, k, -k)
    places = [(2, 1, 0), (0, 2, 1), (0, 0, 2), (1, 0, 4)]  # page, offset, token
    for page, offset, token in places:
        for found, wanted in zip(kv.read((page, slice(None), offset)), (k[token], -k[token]), strict=True):
            scale = wanted.float().abs().amax(-1, keepdim=True) / highest
            step = scale if dtype == torch.int8 else torch.maximum(wanted.float().abs() / 8, scale / 64)
            assert ((found - wanted).abs() <= 0.501 * step).all()
    for side, before in zip(kv, (pool, pool, *torch.full((2, 3, 2, 4), 0.5)), strict=True):
        changed = (side.cpu() != before.cpu()).nonzero()
        assert {(page, offset) for page, _, offset, *_ in changed.tolist()} == {place[:2] for place in places}


@pytest.mark.parametrize("x", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-40])
@pytest.mark.parametrize("backend", every_backend())
def test_a_head_in_8_bits_that_is_not_finite_reads_as_nan_and_zeros_read_as_zeros(backend: str, x: float) -> None:
    device = device_of(backend)
    k, slots = torch.ones(2, 1, 16, device=device), torch.tensor([1, 0], device=device)
    k[0] = 0
    k[0, 0, 3] = x
    kv = KVLayer(*torch.zeros(2, 1, 1, 4, 16, dtype=torch.int8, device=device), *torch.zeros(2, 1, 1, 4, device=device))
    store_of(backend)(kv, slots, k, k)
    for side in kv.read((0, 0)):
        assert side[1].isnan().all() if abs(x) > 1 or x != x else torch.allclose(side[1], k[0, 0], atol=1e-39)
        torch.testing.assert_close(side[0], k[1, 0])


@pytest.mark.parametrize("backend", every_backend())
def test_a_pool_may_have_more_than_two_to_the_31_numbers(backend: str) -> None:
    """Twice 4 GiB, hardly any of it written: a CPU allocates only what is written. K and V are one tensor."""
    pages = 2**31 // (2 * 16 * 64) + 2
    keys, source = (torch.empty(pages, 2, 16, 64, dtype=torch.float16, device=device_of(backend)) for _ in range(2))
    slots = torch.tensor([pages * 16 - 1, 3], dtype=torch.int32, device=keys.device)
    k = source.as_strided((2, 2, 64), (2**31, 64, 1))
    k.copy_(torch.randn(2, 2, 64))
    for page in (0, pages - 1):
        keys[page] = torch.nan
    store_of(backend)(KVLayer(keys, keys), slots, k, k)
    last = pages - 1
    assert torch.equal(keys[last, :, 15], k[0]), f"slot {last * 16 + 15}: not in page {last}: 32-bit offsets?"
    assert torch.equal(keys[0, :, 3], k[1]), "slot 3: its key is not in page 0, offset 3"
    for page in (0, last):
        untouched = keys[page].isnan().sum() == 2 * 15 * 64
        assert untouched, f"page {page}: more was written than one token in its two heads"


@pytest.mark.parametrize(("strides", "offset"), [((80, 40, 1), 1), ((84, 36, 1), 0), ((80, 40, 2), 0)])
def test_rows_of_any_strides_are_stored(strides: tuple[int, int, int], offset: int) -> None:
    """On a GPU another variant is compiled for rows that do not start on 16 bytes."""
    device = device_of("triton")
    k = torch.randn(200, device=device).as_strided((2, 2, 16), strides, offset)
    keys, values = torch.zeros(2, 2, 2, 4, 16, device=device)
    store_of("triton")(KVLayer(keys, values), torch.tensor([5, 0], device=device), k, k)
    for side in (keys, values):
        assert torch.equal(torch.stack((side[1, :, 1], side[0, :, 0])), k)
