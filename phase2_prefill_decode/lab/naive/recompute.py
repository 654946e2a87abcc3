"""`python -m phase2_prefill_decode.lab naive.recompute`: answers without a KV cache, and with one.

Without one, each token is the first of a new prompt: all tokens before it are computed again.
"""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.model import Model

ANSWERS = 16, 64, 256  # tokens
QUESTION = "What is a KV cache?"
RUNS = 5  # the fastest counts: other programs can only slow a run down

Generate = Callable[[Engine[Any], list[int], int], list[int]]


# region generate
def recomputed(engine: Engine[Any], tokens: list[int], count: int) -> list[int]:
    """Every token is the first output of a new request whose prompt is all tokens before it."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for _ in range(count):
        [answer] = engine.generate([tokens], params)
        tokens = [*tokens, *answer.output_tokens]
    return tokens


def kept(engine: Engine[Any], tokens: list[int], count: int) -> list[int]:
    """One request: its keys and values stay in their pages."""
    [answer] = engine.generate([tokens], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
    return [*tokens, *answer.output_tokens]


# endregion


def fastest(generate: Generate, engine: Engine[Any], tokens: list[int], count: int) -> tuple[float, list[int]]:
    runs = []
    for _ in range(RUNS):
        start = time.perf_counter()
        found = generate(engine, tokens, count)
        runs.append((time.perf_counter() - start, found))
    return min(runs)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab naive.recompute", __doc__)
    options = p.parse_args(arguments)
    model = Model.load()
    assert model.tokenizer is not None
    engine, prompt = static(model), model.tokenizer.chat([{"role": "user", "content": QUESTION}])
    kept(engine, prompt, 2)  # warms up
    figures = dict[str, Any]()
    for count in ANSWERS:
        slow, again = fastest(recomputed, engine, prompt, count)
        fast, once = fastest(kept, engine, prompt, count)
        figures[f"answer_{count}"] = {
            "recomputed_tokens": sum(len(prompt) + i for i in range(count)),
            "kept_tokens": len(prompt) + count - 1,
            "recomputed_ms": 1e3 * slow,
            "kept_ms": 1e3 * fast,
            "times": slow / fast,
            "same": int(again == once),
        }
    names = ("answer", "tokens computed", "with a cache", "ms", "with a cache", "times")
    rows = [
        (count, f["recomputed_tokens"], f["kept_tokens"], f["recomputed_ms"], f["kept_ms"], f["times"])
        for count, f in zip(ANSWERS, figures.values(), strict=True)
    ]
    Console().print(table(names, rows, title=f"A prompt of {len(prompt)} tokens, and its answer"))
    finish(p, options, arguments, {"prompt": len(prompt), **figures})
    return 0
