"""`python -m phase2_prefill_decode.lab alone`: how many answers differ between alone and in a batch, on the CPU.

A row's sums must be added in an order that does not depend on how many rows there are. A step of few tokens is one
kernel, so the bundled model answers random prompts as it is, and once more without that kernel.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model

LENGTHS, OUTPUT = range(8, 120), 64  # tokens of a prompt, and of an answer
BATCHES = 4, 16


def answers(model: Model, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    return [done.output_tokens for done in static(model, batch_size=batch_size).generate(prompts, params)]


def models() -> dict[str, Model]:
    """The bundled model in each dtype, and without the one-step kernel."""
    by_layers = replace(backend_for(torch.device("cpu")), whole_step=lambda decoder: None)
    return {
        "bfloat16": Model.load(device="cpu", dtype="bfloat16"),
        "bfloat16_layers": Model.load(device="cpu", dtype="bfloat16", backend=by_layers),
        "float32": Model.load(device="cpu", dtype="float32"),
    }


def measure(requests: int) -> dict[str, Any]:
    """The number of answers that differ from those alone, for each model and size of batch."""
    draw, figures = random.Random(0), dict[str, Any]()
    for name, model in models().items():
        draw.seed(0)
        prompts = [[draw.randrange(model.num_tokens) for _ in range(draw.choice(LENGTHS))] for _ in range(requests)]
        alone = answers(model, prompts, 1)
        figures[name] = {"linear": model.decoder.lm_head.kernel}
        for size in BATCHES:
            together = answers(model, prompts, size)
            figures[name][f"batch_{size}"] = sum(a != b for a, b in zip(alone, together, strict=True))
    return figures


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab alone", __doc__)
    p.add_argument("--requests", type=int, default=500, help="random prompts (%(default)s)")
    options = p.parse_args(arguments)
    torch.set_num_threads(1)
    figures = measure(options.requests)
    rows = [(name, *(row[f"batch_{size}"] for size in BATCHES), row["linear"]) for name, row in figures.items()]
    names = ("model", *(f"in batches of {size}" for size in BATCHES), "linear layers")
    Console().print(table(names, rows, title=f"Answers of {options.requests} that differ from those alone"))
    finish(p, options, arguments, {"requests": options.requests, **figures})
    return 0
