"""What the bundled model loses when the matrices of its layers are rounded, or its keys and values: error of the
weights, of the logits, and of its answers.

python -m chapters.tiny_chat.quantized

Everything is computed in float32, so that nothing differs but what is rounded: weights, keys and values; and, with int8
and int4 as the engine has them on a CPU, what weights are multiplied with, which is rounded to 8 bits. The logits are
those of right answers to the questions of the examination, and each model takes the examination.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from chapters.tiny_chat.corpus import read
from chapters.tiny_chat.judge import SETS, Question, answers_by, examine, figures, held_out, trained
from phase0_request.batch import Batch, Slice
from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.layout import KV_DTYPES
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.weights import load_weights
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.sampling.processors import Work
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import pack

PAGE_SIZE, PAGES = 16, 32
SHOWN = ("bits", "weights", "logits", "millinats", "same", "right", "asked")


@dataclass(frozen=True)
class Rounded:
    """A matrix with fewer bits, and how many a number takes with its share of the scales."""

    weight: Tensor | QuantizedWeight
    bits: float

    @property
    def plain(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else self.weight.dequantize().float()


def by_engine(weight: Tensor, scheme: str) -> Rounded:
    """As `--quantization` rounds it, multiplied as the engine does."""
    quantized = quantize(weight, scheme)
    return Rounded(quantized, 8 * quantized.nbytes / weight.numel())


def weights_only(weight: Tensor, scheme: str) -> Rounded:
    """The same weight, multiplied with inputs in float32."""
    made = by_engine(weight, scheme)
    return Rounded(made.plain, made.bits)


def to_nearest(weight: Tensor, bits: int, group: int) -> Rounded:
    """The largest number of each group decides its scale, of 16 bits; a group of 0 is the row."""
    grouped = weight.float().view(len(weight), -1, group or weight.shape[1])
    largest = 2 ** (bits - 1) - 1
    scales = (grouped.abs().amax(2, keepdim=True) / largest).bfloat16().float().clamp(min=1e-30)
    rounded = (grouped / scales).round().clamp(-largest - 1, largest) * scales
    return Rounded(rounded.flatten(1).to(weight.dtype), bits + 16 / grouped.shape[2])


SCHEMES: dict[str, Callable[[Tensor], Rounded]] = {
    "int8": partial(by_engine, scheme="int8"),
    "fp8": partial(by_engine, scheme="fp8"),
    "int4": partial(by_engine, scheme="int4"),
    "int8_weights": partial(weights_only, scheme="int8"),
    "int4_weights": partial(weights_only, scheme="int4"),
    "int4_nearest_32": partial(to_nearest, bits=4, group=32),
    "int4_nearest_128": partial(to_nearest, bits=4, group=128),
    "int4_nearest_row": partial(to_nearest, bits=4, group=0),
    "int3_nearest_32": partial(to_nearest, bits=3, group=32),
    "int2_nearest_32": partial(to_nearest, bits=2, group=32),
}


def rounded(scheme: Callable[[Tensor], Rounded] | None = None) -> tuple[Model, float, float]:
    """The bundled model with its layers' matrices rounded; the bits of a number; the relative error of the weights."""
    model = Model.load(dtype="float32", device="cpu")
    weights = load_weights(Checkpoint(BUNDLED), model.config)
    if scheme is None:
        return model, 16, 0.0
    bits = lost = total = count = 0.0
    layers = []
    for layer in weights.layers:
        changed: dict[str, Any] = {}
        for field, (_, inputs, _) in model.config.layers[0].tensors(model.config).items():
            if inputs:
                weight = layer[field]
                found = scheme(weight)
                changed[field] = found.weight
                bits, count = bits + found.bits * weight.numel(), count + weight.numel()
                lost, total = lost + float((found.plain - weight).square().sum()), total + float(weight.square().sum())
        layers.append(layer | changed)
    decoder = Decoder(model.config, replace(weights, layers=tuple(layers)), model.decoder.backend)
    return replace(model, decoder=decoder), bits / count, (lost / total) ** 0.5


def logits_of(model: Model, texts: Sequence[tuple[list[int], list[int]]], kv: str = "float32") -> Tensor:
    """The logits before each token of these answers to these prompts: [tokens, vocab_size]. `kv`: the dtype of keys and
    values."""
    cache, pool = PagedCache(PAGES, PAGE_SIZE), KVPool(model.config.kv_layout(PAGE_SIZE, kv), PAGES)
    state, rows = DeviceState(pool.device), []
    for prompt, answer in texts:
        request = Request("text", (*prompt, *answer), SamplingParams())
        cache.attach(request)
        cache.grow(request, request.total)
        state.reserve(cache)
        wanted = Work()
        wanted.rows = range(request.total - 1)
        batch = Batch((Slice(request, 0, request.total),))
        step = pack(batch, cache, state.width, works=[wanted])
        tensors = state.load(step, step.to(pool.device))
        hidden = model.decoder.hidden(tensors, pool.layers)  # of the last token, then of all before it
        rows.append(model.decoder.lm_head(hidden[len(prompt) :]))
        cache.release(request)
    return torch.cat(rows)


def compared(logits: Tensor, wanted: Tensor) -> dict[str, float]:
    """The relative error of logits; the KL divergence, in thousandths of a nat; how often one token is the best."""
    before, after = wanted.log_softmax(1), logits.log_softmax(1)
    return {
        "logits": float((logits - wanted).norm() / (wanted - wanted.mean(1, keepdim=True)).norm()),
        "millinats": 1e3 * float((before.exp() * (before - after)).sum(1).mean()),
        "same": float((logits.argmax(1) == wanted.argmax(1)).float().mean()),
    }


def measure(questions: Sequence[Question], schemes: Mapping[str, Callable[[Tensor], Rounded]]) -> dict[str, Any]:
    facts = read()
    plain, *_ = rounded()
    tokenizer = plain.tokenizer
    assert tokenizer is not None  # of the bundled model
    texts = [
        (
            tokenizer.chat([{"role": "user", "content": question.ask}]),
            tokenizer.encode(question.fact.answer, add_special_tokens=False),
        )
        for question in questions
    ]
    wanted = logits_of(plain, texts)
    rows: dict[str, Any] = {}

    def judged(model: Model, bits: float, error: float, kv: str = "float32") -> dict[str, Any]:
        graded = examine(answers_by(model, kv), questions, facts)
        sets = {each: figures([one for one in graded if one.question.set == each])["right"] for each in SETS}
        errors = compared(logits_of(model, texts, kv), wanted)
        right = {"right": sum(sets.values()), "asked": len(questions), "sets": sets}
        return {"bits": bits, "weights": error, **errors, **right}

    for kv in KV_DTYPES:
        layout = plain.config.kv_layout(PAGE_SIZE, kv)
        numbers = 2 * layout.layers * layout.kv_heads * layout.head_dim
        rows[f"kv_{kv}"] = judged(plain, 8 * layout.bytes_per_token / numbers, 0.0, kv)
    for name, scheme in {"bfloat16": None, **schemes}.items():
        rows[name] = judged(*rounded(scheme))
    return rows


def main(arguments: list[str] | None = None) -> int:
    p = parser("chapters.tiny_chat.quantized", __doc__)
    p.add_argument("--questions", type=int, default=700, help="of the examination's (%(default)s)")
    options, facts = p.parse_args(arguments), read()
    asked = [*held_out(facts), *trained(facts)][: options.questions]
    rows = measure(asked, SCHEMES)
    section(Console(highlight=False), f"The bundled model, {len(asked)} questions", rows, 4, SHOWN)
    finish(p, options, ["--questions", f"{options.questions}"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
