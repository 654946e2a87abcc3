"""`python -m phase5_continuous.lab constrained`: what grammars cost and what they save.

The masks of one output, with the time that each took; and the bundled model under a grammar: steps with and without
forced tokens, and how many outputs are valid at a high temperature.
"""

import gc
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer as HFTokenizer

from phase0_request.lab.report import finish, parser, section, table
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.extras.grammar.constraints import Constraint, fill_masks
from phase2_prefill_decode.extras.grammar.grammar import KEPT, Grammars
from phase2_prefill_decode.model import Model
from phase5_continuous.engine import continuous

SCHEMA = {
    "type": "object",
    "properties": {
        "landform": {"enum": ["glacier", "desert", "island", "volcano"]},
        "description": {"type": "string", "maxLength": 24},
        "is_under_water": {"type": "boolean"},
        "height_in_metres": {"type": "integer", "minimum": 0, "maximum": 9000},
    },
    "required": ["landform", "description", "is_under_water", "height_in_metres"],
    "additionalProperties": False,
}
EXAMPLE = '{"landform":"glacier","description":"a river of ice","is_under_water":false,"height_in_metres":4810}'
SIZES = (4096, 16_384, 65_536, 131_072)
PROPERTIES = (1, 10, 100, 1000)
SERVED = ((1.0, 1), (1.0, 16), (2.0, 64))  # temperatures, and requests at once
SPACED = r"\x20|\n(\x20{0,24}|\t{0,8})"  # a pattern of white space, with a bound
CHOICE = LLMatcher.grammar_from_regex("glacier|desert|island|volcano")


def json_grammar(schema: dict[str, Any], whitespace: str | None = None) -> str:
    """The grammar of a schema; without a pattern of white space, JSON has none."""
    if whitespace is None:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": whitespace}))


GRAMMARS = {  # with an output of each
    "choice": (CHOICE, "volcano"),
    "schema": (json_grammar(SCHEMA), EXAMPLE),
    "any_json": (json_grammar({"type": "object"}, SPACED), EXAMPLE),
}


@cache
def vocabulary(size: int) -> Tokenizer:
    """The bundled tokenizer with a vocabulary made larger by pairs of its own tokens."""
    whole = json.loads(Tokenizer.from_pretrained().to_json())
    rng, model = random.Random(0), whole["model"]
    tokens = [token for token in model["vocab"] if not token.startswith("<|")]
    added = 1 + max(max(model["vocab"].values()), *(token["id"] for token in whole["added_tokens"]))
    while added < size:
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = added
            model["merges"].append([left, right])
            added += 1
    return Tokenizer(HFTokenizer.from_str(json.dumps(whole)), Tokenizer.from_pretrained().eos_ids)


class Drawn(NamedTuple):
    """A place of an output: the token there, and what could have been drawn instead."""

    text: str
    allowed: NDArray[np.bool_]  # [vocabulary]
    forced: bool  # the engine appends it without a draw
    seconds: float  # to make the mask


@cache
def grammars(size: int) -> Grammars:
    tokenizer = vocabulary(size)
    return Grammars(tokenizer, size, tokenizer.eos_ids)


def follow(grammar: str, output: str, size: int = 4096) -> list[Drawn]:
    """Follow an output token by token, as the engine does, and make the mask of each place."""
    tokenizer = vocabulary(size)
    tokens = tokenizer.encode(output, add_special_tokens=False)
    request = Request("a", (1,), SamplingParams(grammar=grammar, max_tokens=len(tokens) + 1))
    constraint, found, forced = Constraint(request, size, grammars(size)), list[Drawn](), 0
    for index, token in enumerate(tokens):
        constraint.go_to(index)
        started = time.perf_counter()
        (bits,) = fill_masks([(constraint, index)], size)
        seconds = time.perf_counter() - started
        allowed = np.unpackbits(bits.view(np.uint8), count=size, bitorder="little").astype(bool)
        if not allowed[token]:
            raise ValueError(f"token {index} of the output, {tokenizer.decode([token])!r}, is not allowed")
        found.append(Drawn(tokenizer.decode([token]), allowed, forced > 0, seconds))
        request.output_tokens.append(token)
        if not forced:
            constraint.go_to(index + 1)
            follows = constraint.forced(index)
            forced = 1 + len(follows.tokens) if follows else 1
        forced -= 1
    return found


def mask_us(name: str, size: int, repeats: int = 5) -> list[float]:
    """Microseconds to make the mask of each place of an output, the best of several times."""
    gc.disable()
    runs = [[place.seconds for place in follow(*GRAMMARS[name], size)] for _ in range(repeats)]
    gc.enable()
    return [1e6 * min(times) for times in zip(*runs, strict=True)]


def compile_ms(properties: int, repeats: int = 5) -> float:
    """Milliseconds to compile an object with this many strings, the best of several times."""
    names = [f"property_{number}" for number in range(properties)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    times = []
    for repeat in range(repeats):
        text = json_grammar(schema | {"title": f"{repeat}"})  # none is compiled yet
        started = time.perf_counter()
        grammars(4096).compile(text)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


@dataclass(frozen=True)
class Served:
    """What became of some requests that were served together."""

    steps: int
    tokens: int
    seconds: float
    finished: int  # outputs that ended by themselves, not at their limit of tokens
    valid: int  # outputs that are JSON and fit the schema


def serve(model: Model, params: SamplingParams, requests: int = 1, prompt: str = "What is a glacier?") -> Served:
    """Serve copies of a request that differ in their seeds."""
    assert model.tokenizer is not None
    loop, tokens = continuous(model, max_running=requests).core, tuple(model.tokenizer.encode(prompt))
    copies = [Request(f"{seed}", tokens, replace(params, seed=seed)) for seed in range(requests)]
    started = time.perf_counter()
    for copy in copies:
        loop.submit(copy)
    steps = sum(1 for _ in loop.run())
    seconds = time.perf_counter() - started
    return Served(
        steps,
        sum(len(copy.output_tokens) for copy in copies),
        seconds,
        sum(copy.finish_reason is FinishReason.STOP for copy in copies),
        sum(fits(model.tokenizer.decode(copy.output_tokens)) for copy in copies),
    )


def fits(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def asked(temperature: float = 1.0, max_tokens: int = 200) -> dict[str, SamplingParams]:
    """The same request in four ways. One that has a list of allowed tokens, here all, draws forced tokens too."""
    common = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    compact = replace(common, grammar=json_grammar(SCHEMA))
    return {
        "no grammar": common,
        "all drawn": replace(compact, allowed_token_ids=range(4096)),
        "forced": compact,
        "white space": replace(common, grammar=json_grammar(SCHEMA, SPACED)),
    }


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab constrained", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    torch.set_num_threads(1)
    model = Model.load(dtype="float32")
    serve(model, asked()["forced"])  # compiles the kernels
    masks = {name: {size: mask_us(name, size) for size in SIZES} for name in GRAMMARS}
    rows = [
        (name, *(f"{median(us):.0f}, at most {max(us):.0f}" for us in times.values())) for name, times in masks.items()
    ]
    console.print(table(("\u00b5s a mask", *(f"{size:,} tokens" for size in SIZES)), rows))
    compiled = {f"properties_{count}": compile_ms(count) for count in PROPERTIES}
    console.print(table(("", "ms to compile"), compiled.items()))
    places, outcomes = follow(*GRAMMARS["schema"]), dict[str, dict[str, float]]()
    for temperature, requests in SERVED:
        for way, params in asked(temperature).items():
            run = min((serve(model, params, requests) for _ in range(5)), key=lambda run: run.seconds)
            key = f"{way.replace(' ', '_')}_{requests}"
            outcomes[key] = asdict(run) | {"ms_per_token": 1e3 * run.seconds / run.tokens}
    figures: dict[str, Any] = {
        "masks": {
            name: {f"tokens_{size}": {"p50_us": median(us), "max_us": max(us)} for size, us in times.items()}
            for name, times in masks.items()
        },
        "compile_ms": compiled,
        "output": {
            "texts": [place.text for place in places],
            "allowed": [int(place.allowed.sum()) for place in places],
            "forced": [place.forced for place in places],
            "tokens": len(places),
            "drawn": sum(not place.forced for place in places),
        },
        "kept": KEPT,
        "served": section(console, "Requests served together", outcomes, digits=2),
    }
    finish(p, options, arguments, figures)
    return 0
