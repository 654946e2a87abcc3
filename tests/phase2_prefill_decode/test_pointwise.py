"""Every backend of the pointwise operations, against float64 and against transformers."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

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
from tests.phase2_prefill_decode.backends import CPU, backend_of

EPS = 1e-6
# Each rounding to the dtype may go the other way, and up to three follow one another: a bit less than two last places.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    """Within the tolerance of a dtype, and NaN exactly where NaN is wanted. A failure says what it is, and where."""
    assert found.dtype == dtype, f"{what}: the dtype is {found.dtype}, not {dtype}"
    assert found.shape == wanted.shape, f"{what}: the shape is {list(found.shape)}, not {list(wanted.shape)}"
    found, limit = found.cpu().double(), TOLERANCE[dtype]
    near = torch.isclose(found, wanted.double(), atol=limit, rtol=limit, equal_nan=True)
    for place in (~near).nonzero()[:1].tolist():
        wrong = f"the number at {place} is {found[*place]:.6g}, not {wanted[*place]:.6g}"
        raise AssertionError(f"{what}: {wrong}; {int((~near).sum())} of {found.numel()} are wrong")


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float64."""
    wide = x.cpu().double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.cpu().double()


# add_norm


SUMS = [*product((64, 1000), (0, 2, 17), (True,)), (384, 1, True), (96, 1, False), (96, 40, False)]


@pytest.mark.parametrize(("width", "tokens", "has_residual"), SUMS)
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_the_sum_and_its_norm(backend: str, dtype: torch.dtype, width: int, tokens: int, has_residual: bool) -> None:
    """The first norm of a model has no residual yet."""
    torch.manual_seed(tokens)
    device = device_of(backend)
    x, residual = (torch.randn(2, tokens, width) * 3).to(device, dtype)
    weight = torch.rand(width).to(device, dtype)
    before = x.clone(), residual.clone()
    found, total = backend_of(backend).add_norm(x, residual if has_residual else None, weight, EPS)
    summed = before[0] + before[1] if has_residual else before[0]
    assert torch.equal(total, summed), "the second result is x + residual, or x where there is no residual"
    what = f"the norm of {tokens} tokens of {width} numbers, {'with' if has_residual else 'without'} a residual"
    assert_near(found, normed(total, weight), dtype, what)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_the_norm_is_that_of_transformers(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    device = device_of(backend)
    norm = Qwen3RMSNorm(512, EPS).to(device, dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(9, 512).to(device, dtype)
    with torch.no_grad():
        wanted = norm(x)
    found, _ = backend_of(backend).add_norm(x, None, norm.weight.data, EPS)
    places = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # one last place
    what = "{}; of transformers' Qwen3RMSNorm for 9 rows of 512. In which order are the roundings?"
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=places[dtype], msg=what.format)


@pytest.mark.parametrize("backend", every_backend())
def test_tiny_and_huge_rows_are_normed(backend: str) -> None:
    device = device_of(backend)
    x = torch.tensor([[1e-4] * 64, [0.0] * 64, [1e15] * 64], device=device)
    found, _ = backend_of(backend).add_norm(x, None, torch.ones(64, device=device), EPS)
    assert_near(found, normed(x, torch.ones(64)), torch.float32, "the norm of rows of 1e-4, 0 and 1e15")


@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_a_nan_stays_in_its_row(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    device = device_of(backend)
    x, residual = torch.randn(2, 3, 64).to(device, dtype)
    weight = torch.ones(64, device=device, dtype=dtype)
    clean, _ = backend_of(backend).add_norm(x, residual, weight, EPS)
    x[1, 5] = torch.nan
    found, total = backend_of(backend).add_norm(x, residual, weight, EPS)
    assert found[1].isnan().all()
    assert total.isnan().sum() == 1
    assert torch.equal(found[::2], clean[::2])


# rotate_store


@dataclass(frozen=True)
class Case:
    """Tokens with their positions and slots, for a pool with NaN in every number."""

    slots: list[int]
    positions: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    pages: int = 5
    norms: bool = True
    beside: int = 0  # numbers between one row of the fused projection and the next
    in_8_bits: torch.dtype | None = None

    def check(self, backend: str, dtype: torch.dtype) -> None:
        torch.manual_seed(len(self.slots))
        skip_float8(backend, self.in_8_bits)
        device = device_of(backend)
        shape = self.pages, self.kv_heads, self.page_size, self.head_dim
        kv = KVLayer(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"))
        if self.in_8_bits is not None:
            scales = torch.full((2, *shape[:3]), torch.nan, device=device)
            kv = KVLayer(*torch.zeros(2, *shape, device=device).to(self.in_8_bits), *scales)
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        qkv = torch.randn(len(self.slots), width + self.beside).to(device, dtype)[:, :width]
        norms = tuple(torch.rand(2, self.head_dim).add(0.5).to(device, dtype)) if self.norms else None
        angles = torch.outer(torch.arange(200.0), 10000.0 ** -(torch.arange(self.head_dim // 2) * 2 / self.head_dim))
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        slots, positions = (torch.tensor(list_, device=device).long() for list_ in (self.slots, self.positions))
        before = qkv.clone()
        q = backend_of(backend).rotate_store(qkv, cos, sin, positions, slots, kv, norms, EPS)
        assert torch.equal(qkv, before)
        wanted = self.turned(qkv, 0, self.heads, norms and norms[0], angles)
        assert_near(q, wanted, dtype, "queries [token, head, number], normed and rotated")
        k = self.turned(qkv, self.heads, self.kv_heads, norms and norms[1], angles)
        v = self.part(qkv, -self.kv_heads, self.kv_heads)
        k, v = (stored(side, self.slots, self.pages, self.page_size) for side in (k, v))
        if self.in_8_bits is not None:
            for found, wanted in zip(kv.read(...), (k, v), strict=True):
                torch.testing.assert_close(found.cpu(), wanted.float(), atol=0.02, rtol=0.07, equal_nan=True)
            return
        assert_near(kv.keys, k, dtype, "keys in the pool [page, head, slot, number], normed and rotated")
        assert torch.equal(bits(kv.values), bits(v))

    def part(self, qkv: Tensor, first: int, heads: int) -> Tensor:
        """Heads of the fused projection, [tokens, heads, head_dim]."""
        rows = qkv.cpu().reshape(len(qkv), self.heads + 2 * self.kv_heads, self.head_dim)
        return rows[:, first:][:, :heads]

    def turned(self, qkv: Tensor, first: int, heads: int, weight: Tensor | None, angles: Tensor) -> Tensor:
        """Normed and rotated in float64: a pair of numbers is a complex one, turned by a multiplication."""
        x = self.part(qkv, first, heads).double()
        x = x if weight is None else normed(x, weight)
        pairs = torch.complex(x[..., : self.head_dim // 2], x[..., self.head_dim // 2 :])
        turn = angles[torch.tensor(self.positions).long()].double()
        pairs = pairs * torch.polar(torch.ones_like(turn), turn)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)


EDGES = {
    "one_token": Case([37], [0]),
    "the_last_position": Case([79], [199]),
    "a_prompt": Case(list(range(20)), list(range(20))),
    "a_long_prompt": Case(list(range(150)), list(range(150)), pages=10),
    "decodes": Case([40, 3, 70], [7, 120, 7]),
    "pages_out_of_order": Case([*range(64, 80), *range(16), *range(32, 40)], list(range(40))),
    "padding_between": Case([5, -1, 6, -1, 40], [3, 0, 4, 0, 9]),
    "only_padding": Case([-1] * 5, [0] * 5),
    "no_token": Case([], []),
    "pages_of_one": Case([4, 1, 0], [2, 3, 4], page_size=1),
    "pages_of_64": Case([60, 64, 319], [60, 61, 62], page_size=64),
    "no_norms": Case([5, -1, 6, 40], [3, 0, 4, 9], norms=False),
    "in_int8": Case([5, -1, 6, 40], [3, 0, 4, 9], in_8_bits=torch.int8),
    "in_fp8_without_norms": Case([60, 64, 319], [60, 61, 62], 3, 1, 80, 64, norms=False, in_8_bits=torch.float8_e4m3fn),
    "a_long_prompt_without_norms": Case(list(range(150)), list(range(150)), pages=10, norms=False),
    "a_wider_tensor": Case([5, -1, 6, 40], [3, 0, 4, 9], beside=64),
    "a_wider_tensor_without_norms": Case([5, -1, 6, 40], [3, 0, 4, 9], beside=64, norms=False),
    **{f"heads_of_{n}": Case([20, 3, -1], [1, 2, 3], head_dim=n) for n in (16, 80, 256)},
    **{f"{n}_to_{m}_heads": Case([20, 3], [1, 2], heads=n, kv_heads=m) for n, m in ((1, 1), (3, 1), (8, 8), (14, 2))},
}


@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_q_and_k_are_normed_and_rotated_and_k_and_v_stored(backend: str, dtype: torch.dtype, case: Case) -> None:
    case.check(backend, dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pages, page_size, slots = draw(pages_and_slots())
    positions = draw(st.lists(st.integers(0, 199), min_size=len(slots), max_size=len(slots)))
    heads, dim = draw(st.integers(1, 6)), draw(st.sampled_from([16, 48, 64]))
    return Case(slots, positions, heads, draw(st.integers(1, 3)), dim, page_size, pages, draw(st.booleans()))


@pytest.mark.parametrize("backend", every_backend())
@settings(max_examples=50)
@given(case=cases())
def test_random_tokens_are_rotated_and_stored(backend: str, case: Case) -> None:
    case.check(backend, torch.float32)


@pytest.mark.parametrize(
    ("slots", "positions", "message"),
    [
        ([5, 6], [3, -1], "a position is outside of the rotary tables"),
        ([5, 6], [200, 3], "a position is outside of the rotary tables"),
        ([-1, 6], [-5, 3], "a position is outside of the rotary tables"),
        ([5, 80], [3, 4], "a slot is outside of the pool"),
        ([10**15, 5], [3, 4], "a slot is outside of the pool"),
    ],
)
def test_slots_and_positions_out_of_range_are_refused_on_a_cpu(
    slots: list[int], positions: list[int], message: str
) -> None:
    keys = torch.full((5, 2, 16, 64), torch.nan)
    angles = torch.zeros(200, 32)
    with pytest.raises(IndexError, match=message):
        CPU.rotate_store(
            torch.zeros(2, 512),
            angles,
            angles,
            torch.tensor(positions),
            torch.tensor(slots),
            KVLayer(keys, keys),
            None,
            EPS,
        )
    assert keys.isnan().all(), "what was right of it is not written either"


# swiglu


@pytest.mark.parametrize(("inner", "tokens"), [*product((64, 1000), (0, 1, 3)), (384, 50)])
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_swiglu(backend: str, dtype: torch.dtype, inner: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    gate, up = (torch.randn(2, tokens, inner) * 4).to(dtype)
    found = backend_of(backend).swiglu(torch.cat((gate, up), 1).to(device_of(backend)))
    assert_near(found, gate.double() / (1 + (-gate.double()).exp()) * up.double(), dtype, "silu(gate) * up")


@pytest.mark.parametrize("backend", every_backend())
def test_swiglu_of_large_gates(backend: str) -> None:
    gate = torch.tensor([-1e30, -1000.0, -100.0, -88.8, 0.0, 88.8, 1000.0, 1e30, torch.nan]).repeat(8)
    gate_up = torch.cat((gate, torch.full_like(gate, 2.0)))[None].to(device_of(backend))
    found = backend_of(backend).swiglu(gate_up).cpu()[0]
    wanted = gate.double() / (1 + (-gate.double()).exp()) * 2
    torch.testing.assert_close(found.double(), wanted, atol=1e-30, rtol=1e-5, equal_nan=True)
