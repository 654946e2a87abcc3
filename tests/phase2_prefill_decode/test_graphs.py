"""What recorded decode steps keep on the device, and what they copy there. The steps are recorded on the CPU."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.extras.piecewise import PiecewiseGraphs
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.graphs import Computed, Replay
from phase2_prefill_decode.step.runner import ModelRunner
from tests.phase2_prefill_decode.steps import loaded

CONFIG = ModelConfig(
    vocab_size=307, num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, dtype="float32",
)  # fmt: skip
SIZES = [1, 2, 4]


class Copies(TorchDispatchMode):
    """Notes the shapes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::copy_", "aten::clone", "aten::_to_copy"):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def recorded(model: Model) -> tuple[ModelRunner, list[Computed], list[tuple[int, ...]]]:
    """A runner that has recorded steps, what they have computed, and the shapes that they have copied."""
    state, computed, copies = DeviceState(torch.device("cpu"), 4, 16), [], Copies()

    def record(run: Replay) -> Replay:
        with copies:
            computed.append(run())
        return run

    pool = KVPool(CONFIG.kv_layout(4), 16, "cpu", torch.float32)
    runner = ModelRunner(model.decoder, pool, PagedCache(16, 4), sampler_for(model, 0), state)
    runner.record(SIZES, 64, record)
    return runner, computed, copies.shapes


def test_rotary_tables_live_as_long_as_the_graphs_that_were_recorded_with_them() -> None:
    """A second engine over the same model has a longer context: the model's tables are replaced by larger ones."""
    model = Model.random(CONFIG, device="cpu")
    model.decoder.rope(64)
    runner, _, _ = recorded(model)
    tables = [weakref.ref(table) for table in model.decoder._rope[0]]
    assert len(model.decoder.rope(512)[0][0]) == 512
    gc.collect()
    assert all(table() is not None for table in tables), "the graphs read memory that is free"
    del runner
    gc.collect()
    assert all(table() is None for table in tables), "without graphs nothing needs the smaller tables"


def test_a_recorded_step_writes_its_logits_where_all_graphs_have_theirs_and_copies_none() -> None:
    model = Model.random(CONFIG, device="cpu")
    runner, computed, copies = recorded(model)
    assert [len(step.logits) for step in computed] == [4, 2, 1]
    assert len({step.logits.data_ptr() for step in computed}) == 1
    assert [shape for shape in copies if CONFIG.vocab_size in shape] == []
    hidden = torch.randn(2, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    out = torch.empty(2, CONFIG.vocab_size)
    assert torch.equal(runner.decoder.lm_head(hidden, out), runner.decoder.lm_head(hidden))


def test_pieces_compute_and_store_what_a_step_kernel_by_kernel_does() -> None:
    """A step, and one of fewer tokens over what it has left: padding stores nothing."""
    model = Model.random(replace(CONFIG, num_hidden_layers=3, layers=()), device="cpu", backend=TORCH)
    plain, recorded = (KVPool(model.config.kv_layout(4), 16, "cpu", torch.float32) for _ in range(2))
    pieces = PiecewiseGraphs(model.decoder, recorded.layers, 64, 16)
    pieces.record([8, 16], lambda run: run)
    cache = PagedCache(16, 4)
    requests = [Request(name, tuple(range(1, 12))) for name in "ab"]
    for request in requests:
        cache.attach(request)
        cache.grow(request, 11)
    a, b = requests
    for slices in ((Slice(a, 0, 10), Slice(b, 0, 3)), (Slice(a, 10, 1), Slice(b, 3, 2)), (Slice(b, 5, 6),)):
        step = loaded(Batch(slices), cache)
        wanted = model.decoder.hidden(step, plain.layers)
        torch.testing.assert_close(pieces(step, recorded.layers), wanted, rtol=1e-5, atol=1e-6)
        for one, other in zip(plain.layers, recorded.layers, strict=True):
            torch.testing.assert_close(one[:2], other[:2], rtol=1e-5, atol=1e-6)
