"""The whole decode step of a small model in one kernel: the result of transformers, and of the decoder's layers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phase1_kv_pool.kernels.store import store
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.decoder import Decoder, StepTensors
from phase2_prefill_decode.extras.cpu import forward
from phase2_prefill_decode.extras.cpu.forward import Forward
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import Weights, random_weights
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling.sampler import pack_columns
from tests.phase2_prefill_decode.attention_cases import same_bits
from tests.phase2_prefill_decode.backends import CPU
from tests.phase2_prefill_decode.models import VARIANTS, saved, tiny_model
from tests.phase2_prefill_decode.test_identity import logits, prompts
from tests.phase2_prefill_decode.tiny import windowed

SMALL = ModelConfig(
    model_type="qwen3", vocab_size=320, num_hidden_layers=3, hidden_size=64, intermediate_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=24, qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip
LENGTHS = 17, 600, 1, 32, 5, 90, 16, 33, 2  # of the sequences; 600 keys would be split by the attention of other steps
PAGES = 40
KINDS = "llama", "mistral", "qwen3", "llama-tied", "llama-one-kv-head", "llama-wide-heads", "mistral-window"


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that was one kernel."""
    tokens: list[int] = []
    call = Forward.__call__

    def counted(self: Forward, x: Tensor, *arguments: Any) -> Tensor:
        tokens.append(len(x))
        return call(self, x, *arguments)

    monkeypatch.setattr(Forward, "__call__", counted)
    return tokens


def by_layers(decoder: Decoder) -> Decoder:
    """The same decoder, without the kernel."""
    layers = Decoder.__new__(Decoder)
    layers.__dict__ = decoder.__dict__ | {"whole_step": None}
    return layers


def packed(lengths: tuple[int, ...], new: int = 1) -> StepTensors:
    """The last `new` tokens of sequences of these lengths."""
    total = torch.tensor(lengths, dtype=torch.int32)
    positions = torch.cat([torch.arange(length - new, length) for length in lengths])
    table = torch.arange(len(lengths) * PAGES, dtype=torch.int32).view(-1, PAGES)
    rows = torch.arange(len(lengths)).repeat_interleave(new)
    slots = table[rows, positions // 16].long() * 16 + positions % 16
    ends = torch.arange(0, len(positions) + 1, new, dtype=torch.int32)
    metadata = AttentionMetadata(ends, total, table, new, max(lengths), tuple((new, length) for length in lengths))
    params = SamplingInputs(*map(torch.from_numpy, pack_columns((), (), hash)))
    return StepTensors(torch.arange(len(positions)) + 7, positions, slots, metadata, None, rows, params)


def pool_of(config: ModelConfig, kv_dtype: str | None = None) -> KVPool:
    pool = KVPool(config.kv_layout(16, kv_dtype or config.dtype), len(LENGTHS) * PAGES)
    draw, slots = torch.Generator().manual_seed(3), torch.arange(pool.num_pages * pool.layout.page_size)
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, len(slots), 2, config.head_dim, generator=draw).to(getattr(torch, config.dtype))
        store(pool.layers[layer], slots, k, v)
    return pool


@pytest.mark.parametrize("name", KINDS)
def test_the_logits_are_those_of_transformers(name: str, tmp_path: Path, calls: list[int]) -> None:
    family, options = VARIANTS[name]
    oracle: Any = tiny_model(family, **{"vocab_size": 320, "intermediate_size": 128, **options})
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="bfloat16")
    (prompt,) = prompts(320, [41])
    with torch.inference_mode():
        wanted = oracle.to(torch.bfloat16).float()(torch.tensor([prompt])).logits[0]
        theirs = oracle.to(torch.bfloat16)(torch.tensor([prompt])).logits[0].float()
    found = logits(model, prompt).float()
    assert calls == [1] * 41
    assert (found - wanted).norm() < min(3e-2 * wanted.norm(), 1.5 * (theirs - wanted).norm())


def in_many_formats(config: ModelConfig) -> Weights:
    """Each matrix quantized in a way of its own, as in GGUF files; of qkv each of the three, but in the last layer."""
    plain = random_weights(config)
    *layers, last = plain.layers
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    for number, layer in enumerate(layers):
        q, k, v = torch.split(layer["qkv_proj"], [count * config.head_dim for count in heads])
        layers[number] = layer | {
            "qkv_proj": (quantize(q, "int4"), quantize(k, "int8"), v),
            "o_proj": quantize(layer["o_proj"], "int4"),
            "gate_up_proj": quantize(layer["gate_up_proj"], "fp8"),
            "down_proj": quantize(layer["down_proj"], "int8"),
        }
    head = quantize(plain.lm_head, "int8")
    return replace(plain, layers=(*layers, last), embed_tokens=head, lm_head=head)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (SMALL, random_weights),
        (replace(SMALL, vocab_size=321, qkv_bias=True, mlp_bias=True), in_many_formats),
        (replace(SMALL, dtype="float32"), random_weights),
    ],
)
@pytest.mark.parametrize(
    ("count", "new", "kv"),
    [(1, 1, "int8"), (2, 1, "int8"), (4, 1, None), (9, 1, "int8"), (1, 8, None), (9, 3, "int8")],
)
def test_logits_keys_and_values_are_those_of_the_layers(
    count: int,
    new: int,
    kv: str | None,
    config: ModelConfig,
    weights: Callable[[ModelConfig], Weights],
    calls: list[int],
) -> None:
    decoder = Decoder(config, weights(config), CPU)
    step, pools = (
        packed(tuple(length + new - 1 for length in LENGTHS[:count]), new),
        [pool_of(config, kv), pool_of(config, kv)],
    )
    found, _ = decoder(step, pools[0].layers)
    assert calls == [count * new]
    wanted, _ = by_layers(decoder)(step, pools[1].layers)
    assert calls == [count * new]
    assert torch.equal(found, wanted)
    assert all(map(same_bits, pools[0].tensors, pools[1].tensors))


def test_a_row_does_not_depend_on_the_others() -> None:
    decoder = Decoder(SMALL, random_weights(SMALL), CPU)
    pool = pool_of(SMALL)
    alone, _ = decoder(packed(LENGTHS[:1]), pool.layers)
    assert torch.equal(decoder(packed(LENGTHS), pool.layers)[0][:1], alone)


@pytest.mark.parametrize("window", [None, 7, 40])
def test_tokens_that_are_verified_have_the_bits_of_decodes(window: int | None) -> None:
    config = replace(SMALL, layers=windowed(*[window] * 3)) if window else SMALL
    decoder, pool = Decoder(config, random_weights(config), CPU), pool_of(config)
    together = decoder(packed((70, 620), 5), pool.layers)[0].unflatten(0, (2, 5))
    for place in range(5):
        step = packed((66 + place, 616 + place))
        step.tokens[:] = torch.tensor([place, place + 5]) + 7
        assert torch.equal(decoder(step, pool.layers)[0], together[:, place])


def test_engines_that_share_a_model_store_in_their_own_pools() -> None:
    decoder, first, second = Decoder(SMALL, random_weights(SMALL), CPU), pool_of(SMALL), pool_of(SMALL)
    twin, step = [tensor.clone() for tensor in second.tensors], packed(LENGTHS)
    wanted, _ = decoder(step, first.layers)
    assert all(map(torch.equal, second.tensors, twin)), "a step of the first engine is not in the pool of the second"
    assert torch.equal(decoder(step, second.layers)[0], wanted)
    assert all(map(torch.equal, second.tensors, first.tensors))
    other = pool_of(replace(SMALL, head_dim=32))
    with pytest.raises(ValueError, match="all heads of one size"):
        decoder(step, other.layers)
    assert torch.equal(decoder(step, first.layers)[0], wanted)


def test_padding_stores_nothing_and_only_the_rows_that_are_wanted_return() -> None:
    decoder = Decoder(SMALL, random_weights(SMALL), CPU)
    pool, untouched, step = pool_of(SMALL), pool_of(SMALL), packed(LENGTHS[:2])
    step.slots.fill_(-1)
    both, _ = decoder(step, pool.layers)
    assert all(map(torch.equal, pool.tensors, untouched.tensors))
    last = step._replace(last=torch.tensor([1]), newest_rows=torch.tensor([1]))
    assert torch.equal(decoder(last, pool.layers)[0], both[1:])


def test_other_steps_and_other_models_go_by_layers(calls: list[int]) -> None:
    weights, pool = random_weights(SMALL), pool_of(SMALL)
    decoder = Decoder(SMALL, weights, CPU)
    last = torch.tensor([2, 5])
    decoder(
        packed((17, 32), new=3)._replace(last=last, newest_rows=last), pool.layers
    )  # prompts: few of their logits count
    Decoder(SMALL, weights, TORCH)(packed(LENGTHS[:1]), pool.layers)
    assert calls == []
    config = replace(SMALL, intermediate_size=96)
    assert Decoder(config, random_weights(config), CPU).whole_step is None, "gate and up share a block of 64"


def test_without_openmp_it_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, pool = Decoder(SMALL, random_weights(SMALL), CPU), pool_of(SMALL)
    wanted, _ = decoder(packed(LENGTHS), pool.layers)
    monkeypatch.setattr(forward, "OPENMP", 0)  # a call to address 0 would end the process
    assert torch.equal(decoder(packed(LENGTHS), pool.layers)[0], wanted)


@pytest.mark.parametrize(("field", "value"), [("positions", 4096), ("positions", -1), ("slots", 1 << 20)])
def test_positions_and_slots_outside_are_refused(field: str, value: int) -> None:
    decoder, pool, step = Decoder(SMALL, random_weights(SMALL), CPU), pool_of(SMALL), packed(LENGTHS)
    getattr(step, field)[1] = value
    with pytest.raises(IndexError, match="outside"):
        decoder(step, pool.layers)
