"""A few tokens of the bundled model through the kernels in Triton, interpreted without a GPU, beside plain torch."""

import argparse
import sys
import time

from rich.console import Console

from phase0_request.lab.report import at_least_one
from phase0_request.params import SamplingParams
from phase2_prefill_decode.backend import TORCH, Backend, triton_backend
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model

QUESTION = "What is a KV cache?"


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m chapters mine --interpret", description=__doc__)
    p.add_argument("question", nargs="?", default=QUESTION, help="(%(default)s)")
    p.add_argument("--max-tokens", type=at_least_one, default=8, metavar="N", help="(%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False, markup=False)
    began = time.perf_counter()
    tokens, text = answer(triton_backend(), options.question, options.max_tokens)
    console.print(f"Triton: {text}   ({time.perf_counter() - began:.0f} s)")
    expected, text = answer(TORCH, options.question, options.max_tokens)
    console.print(f"torch:  {text}")
    if tokens != expected:
        place = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), 0)
        console.print(f"They differ from token {place} on: {tokens[place:]} in place of {expected[place:]}.")
        return 1
    console.print(f"The same {len(tokens)} tokens.")
    return 0


def answer(backend: Backend, question: str, max_tokens: int) -> tuple[list[int], str]:
    """The greedy answer of the bundled model, in float32, by these operations."""
    model = Model.load(dtype="float32", backend=backend)
    assert model.tokenizer is not None
    prompt = model.tokenizer.chat([{"role": "user", "content": question}])
    (done,) = static(model).generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return done.output_tokens, done.text


if __name__ == "__main__":
    sys.exit(main())
