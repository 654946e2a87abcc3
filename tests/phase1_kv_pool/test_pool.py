import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phase0_request import Request, Slice
from phase0_request.support.memory import free_bytes, free_on_cpu
from phase1_kv_pool import KVLayout, OutOfPagesError, PagedCache
from phase1_kv_pool import pool as pool_module
from phase1_kv_pool.kernels.store import store
from phase1_kv_pool.pool import KVPool
from tests.phase1_kv_pool.support import needs_gpu

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=16, page_size=4, dtype="float32")


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Nothing if two tensors are equal; else their shapes, or the first place where they differ."""
    if found.shape != wanted.shape:
        return f"the shape is {list(found.shape)}, not {list(wanted.shape)}"
    for place in (found != wanted).nonzero()[:1].tolist():
        token, head, number = place
        return f"token {token}, head {head}, number {number} is {found[*place]:.4g}, not {wanted[*place]:.4g}"
    return ""


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def rows(tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, tokens, 3, 16).to(device, dtype)
    return k, v


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 32),
    st.integers(1, 64),
    st.sampled_from(["float32", "bfloat16", "float16", "int8", "fp8"]),
)
def test_byte_counts_equal_the_tensors(layers: int, heads: int, dim: int, page: int, dtype: str) -> None:
    layout, in_8_bits = KVLayout(layers, heads, dim, page, dtype), dtype in ("int8", "fp8")
    number = torch.uint8 if in_8_bits else getattr(torch, dtype)
    tensors = [torch.empty(3, heads, page, dim, dtype=number) for _ in range(2 * layers)]
    tensors += [torch.empty(3, heads, page) for _ in range(2 * layers * in_8_bits)]
    assert layout.bytes_per_page * 3 == sum(t.nbytes for t in tensors)
    assert layout.bytes_per_token * page == layout.bytes_per_page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_pool_on_a_gpu_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:1' needs a GPU, and torch \S+ sees none"):
        KVPool(LAYOUT, 1, "cuda:1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_each_layer_has_zeroed_key_and_value_pages(device: str, dtype: torch.dtype | None) -> None:
    layout = KVLayout(layers=2, kv_heads=3, head_dim=16, page_size=4, dtype="bfloat16")
    pool = KVPool(layout, 5, device, dtype)
    assert pool.dtype == (dtype or torch.bfloat16)
    assert len(pool.layers) == 2
    for side in pool.tensors:
        assert side.shape == (5, 3, 4, 16)
        assert (side.dtype, side.device) == (pool.dtype, pool.device)
        assert side.is_contiguous()
        assert not side.any()
    assert 5 * pool.layout.bytes_per_page == sum(side.nbytes for side in pool.tensors)
    assert len({side.data_ptr() for side in pool.tensors}) == 4


@pytest.mark.proof
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_keys_and_values_are_gathered_through_page_tables(device: str, dtype: torch.dtype) -> None:
    """Page tables and pool together, as in the engine: requests grow side by side, finish, and others arrive."""
    rng, cache, pool = random.Random(0), PagedCache(12, page_size=4), KVPool(LAYOUT, 12, device, dtype)
    torch.manual_seed(0)
    live: dict[str, tuple[Request, list[Any], list[Any]]] = {}
    gathered = 0
    for step in range(150):
        if len(live) < 4:
            request = Request(f"r{step}", (1,) * 40)
            live[request.id] = request, [], []
            cache.attach(request)
        request, ks, vs = live[rng.choice(list(live))]
        start, more = len(ks), rng.randint(1, 5)
        try:
            cache.grow(request, start + more)
        except OutOfPagesError:
            cache.release(request)
            del live[request.id]
            continue
        slots = torch.tensor(cache.slots(Slice(request, start, more)), device=device)
        for layer in range(2):
            k, v = rows(more, device, dtype)
            store(pool.layers[layer], slots, k, v)
            ks, vs = (ks + list(k), vs + list(v)) if layer else (ks, vs)
        live[request.id] = request, ks, vs
        for other, other_ks, other_vs in live.values():
            if other_ks:
                k, v = pool.layers[1].gather(torch.tensor(cache.table(other), device=device), len(other_ks))
                for side, found, wanted in (("keys", k, other_ks), ("values", v, other_vs)):
                    assert not (wrong := difference(found, torch.stack(wanted))), f"{side} of {other.id}: {wrong}"
                gathered += len(other_ks)
    assert gathered > 1000


def test_gather_returns_length_tokens() -> None:
    pool = KVPool(LAYOUT, 4)
    k, v = rows(7)
    store(pool.layers[0], torch.tensor([12, 13, 14, 15, 4, 5, 6]), k, v)
    for length in range(8):
        for name, found, wanted in zip(
            ("keys", "values"), pool.layers[0].gather(torch.tensor([3, 1, 0]), length), (k, v), strict=True
        ):
            wrong = difference(found, wanted[:length])
            assert not wrong, f"{name} of the first {length} tokens of the page table 3 1 0, pages of 4: {wrong}"


@pytest.mark.parametrize(("dtype", "number"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_pool_in_8_bits_has_scales_and_takes_any_float(dtype: str, number: torch.dtype) -> None:
    pool = KVPool(replace(LAYOUT, dtype=dtype), 5)
    assert [(side.dtype, side.shape) for side in pool.tensors[:4]] == [(number, (5, 3, 4, 16))] * 2 + [
        (torch.float32, (5, 3, 4))
    ] * 2
    assert 5 * pool.layout.bytes_per_page == sum(side.nbytes for side in pool.tensors)
    k, v = rows(2, dtype=torch.bfloat16)
    store(pool.layers[1], torch.tensor([3, 9]), k, v)
    for found, wanted in zip(pool.layers[1].gather(torch.tensor([2]), 2), (k, v), strict=True):
        torch.testing.assert_close(found[1], wanted[1].float(), atol=0.02, rtol=0.07)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_float8_on_a_gpu_that_lacks_it_is_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"fp8 .* capability 8\.9, this is 8\.{capability[1]}; int8 works"):
        pool_module._check_float8(capability)
    pool_module._check_float8((8, 9))


def test_on_a_cpu_a_slot_past_the_end_is_refused() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        store(KVPool(LAYOUT, 2).layers[0], torch.tensor([8]), *rows(1))


def test_a_pool_larger_than_free_memory_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    page = LAYOUT.bytes_per_page
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 10 * page)
    assert KVPool(LAYOUT, 10).num_pages == 10
    with pytest.raises(ValueError, match=r"11 pages of 4 tokens .* 10 pages would fit"):
        KVPool(LAYOUT, 11)
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: 3 << 29)
    with pytest.raises(ValueError, match=rf"need 2861022\.95 GiB on cpu, where 1\.50 GiB .* {(3 << 29) // page} pages"):
        KVPool(LAYOUT, 10**12)
    monkeypatch.setattr(pool_module, "free_bytes", lambda device: None)
    assert KVPool(LAYOUT, 10).num_pages == 10


MEMINFO = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"


def group(path: str, limit: str, used: int, cached: int, version: int = 2) -> dict[str, str]:
    names = ["memory.max", "memory.current", "inactive_file"]
    if version == 1:
        names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"]
    stat = f"anon 1\n{names[2]} {cached}\nactive_file 7\n"
    return {f"{path}/{names[0]}": f"{limit}\n", f"{path}/{names[1]}": f"{used}\n", f"{path}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/\n"}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a/b", "5000", 3000, 400)}, 2400),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a", "900", 300, 0)}, 600),
        ({"proc/self/cgroup": "0::/a/b\n", **group("sys/fs/cgroup/a/b", "max", 300, 0)}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/elsewhere\n", **group("sys/fs/cgroup", "800", 100, 0)}, 700),
        ({"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "800", 1000, 0)}, 0),
        ({"proc/self/cgroup": "4:cpu,memory:/x\n0::/\n", **group("sys/fs/cgroup/memory/x", "70", 50, 5, 1)}, 25),
        ({"proc/self/cgroup": "4:cpu:/x\n", **group("sys/fs/cgroup/cpu/x", "70", 50, 5, 1)}, 1000 * 1024),
        ({"proc/self/cgroup": "4:memory:/x\n", **group("sys/fs/cgroup/memory", str(2**63 - 1), 5, 0, 1)}, 1000 * 1024),
    ],
)
def test_control_groups_limit_free_memory(tmp_path: Path, files: dict[str, str], free: int) -> None:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_on_cpu(tmp_path) == free


def test_free_memory_is_at_most_that_of_the_machine(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_on_cpu(tmp_path) == total, "a system without /proc"
    assert 0 < (free_bytes(torch.device("cpu")) or 0) <= total


@pytest.mark.gpu
@needs_gpu
def test_memory_that_torch_keeps_of_a_deleted_pool_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(device: torch.device) -> tuple[int, int]:  # as if no other process used the GPU
        return (1 << 40) - torch.cuda.memory_reserved(device), 1 << 40

    monkeypatch.setattr(torch.cuda, "mem_get_info", alone)
    device = torch.device("cuda", torch.cuda.current_device())
    before = free_bytes(device)
    pool = KVPool(LAYOUT, 100_000, "cuda")
    during = free_bytes(device)
    del pool
    after = free_bytes(device)
    assert before is not None
    assert during is not None
    assert after is not None
    assert before - during >= 100_000 * LAYOUT.bytes_per_page
    assert after == before


def test_a_pool_on_a_cpu_never_loads_triton() -> None:
    program = "import sys, torch\nfrom phase1_kv_pool import KVLayout\nfrom phase1_kv_pool.pool import KVPool\n"
    program += "from phase1_kv_pool.kernels.store import store\n"
    program += "pool = KVPool(KVLayout(1, 1, 8), 1, 'cpu', torch.float32)\n"
    program += "store(pool.layers[0], torch.tensor([3]), torch.ones(1, 1, 8), torch.ones(1, 1, 8))\n"
    program += "assert pool.layers[0].keys.sum() == 8\nprint('triton' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "False"
