"""The decoder over pages, against transformers' own forward pass: prompts, chunks and decodes in one step."""

from pathlib import Path

import pytest
import torch

from phase0_request.batch import Batch, Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import random_weights
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.rope import tables
from tests.phase2_prefill_decode.models import saved, variant
from tests.phase2_prefill_decode.steps import loaded

SMALL = ModelConfig(
    model_type="qwen3", vocab_size=300, num_hidden_layers=2, hidden_size=32, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_norm=True, max_position_embeddings=64,
    dtype="float32",
)  # fmt: skip
# Of three requests in three steps: the name, the first token and the end of the slice, whether it ends what is known
STEPS = [
    [("a", 0, 23, True), ("b", 0, 16, False)],
    [("a", 23, 24, True), ("b", 16, 37, False), ("c", 0, 17, True)],
    [("a", 24, 25, True), ("b", 37, 40, True), ("c", 17, 18, True)],
]


@pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "qwen2-window", "qwen3-window"])
def test_every_step_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Its layers, one after the other: the reference has no step in one call."""
    oracle = variant(name)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32", backend=TORCH)
    draw, cache = torch.Generator().manual_seed(1), PagedCache(24, 4)
    tokens = {name: torch.randint(3, 300, (40,), generator=draw) for name in "abc"}
    for name_, length in (("b", 9), ("a", 25), ("c", 18), ("b", 40)):  # pages in no order
        request = Request(name_, tuple(tokens[name_].tolist()))
        if name_ in cache.changed:
            cache.release(request)
        cache.attach(request)
        cache.grow(request, length)
    pool = KVPool(model.config.kv_layout(4), 24, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        wanted = {name: oracle(of[None]).logits[0] for name, of in tokens.items()}
    for number, step in enumerate(STEPS, 1):
        pieces = [
            Slice(Request(one, tuple(tokens[one][: stop if whole else 40].tolist())), start, stop - start)
            for one, start, stop, whole in step
        ]
        found, _ = model.decoder(loaded(Batch(tuple(pieces)), cache), pool.layers)
        ends = [(one, stop) for one, _, stop, whole in step if whole]
        shape = [len(ends), model.config.vocab_size]
        assert list(found.shape) == shape, f"step {number}: logits of the requests {[one for one, _ in ends]} only"
        for row, (one, stop) in zip(found, ends, strict=True):
            off = float((row - wanted[one][stop - 1]).abs().max())
            assert off < 1e-4, f"step {number}: the logits of request {one} after {stop} tokens are off by {off:.3g}"


def test_the_rotary_tables_grow_with_the_longest_sequence() -> None:
    """Twice as long each time, or as long as is needed; no longer than the model's context unless that is needed."""
    decoder = Decoder(SMALL, random_weights(SMALL), TORCH)
    found = []
    for positions in (10, 4, 11, 50, 51, 70):
        before = decoder._rope
        cos, sin = decoder.rope(positions)[0]
        found.append(len(cos))
        assert positions > len(before[0][0]) or decoder.rope(positions) is before, "long enough: not built again"
        wanted = tables(SMALL.rope_parameters, SMALL.head_dim, len(cos))
        assert torch.equal(cos, wanted[0])
        assert torch.equal(sin, wanted[1])
    assert found == [10, 10, 20, 50, 64, 70], "the rows of the tables after sequences of 10, 4, 11, 50, 51, 70 tokens"
