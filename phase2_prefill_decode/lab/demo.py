"""`python -m phase2_prefill_decode "What is a KV cache?"`: an answer, and the steps that made it.

The prompt is computed in one step, and each token of the answer in a step of its own.
"""

import argparse

from rich.console import Console

from phase0_request.lab.viewer import Recording
from phase0_request.params import SamplingParams

RUNS = 3  # the fastest is shown: other programs can only slow a run down


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase2_prefill_decode", description=__doc__)
    p.add_argument("question", nargs="?", default="What is a KV cache?", help="(%(default)s)")
    p.add_argument("--max-tokens", type=int, default=96, help="(%(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    p.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    p.add_argument("--seed", type=int, help="of the sampling; the same seed, the same answer")
    p.add_argument("--torch", action="store_true", help="by the references in plain torch, on the CPU")
    options, console = p.parse_args(arguments), Console(highlight=False)
    sampling = {name: value for name, value in vars(options).items() if name not in ("question", "torch")}
    try:
        params = SamplingParams(**sampling)
    except ValueError as error:
        p.error(str(error))
    from phase2_prefill_decode.backend import TORCH
    from phase2_prefill_decode.engine import static  # torch and numba load here, after the options have been checked
    from phase2_prefill_decode.generation import make_requests
    from phase2_prefill_decode.model import Model

    model = Model.load(device="cpu", backend=TORCH) if options.torch else Model.load(progress=True)
    engine, tokenizer = static(model), model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.chat([{"role": "user", "content": options.question}])
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))  # warms up
    runs = []
    for number in range(RUNS):
        (request,) = make_requests([prompt], params, model, engine.core.clock(), iter((f"run-{number}",)))
        engine.core.submit(request)
        steps = list(engine.core.run())
        runs.append((sum(step.seconds for step in steps), request, steps))
    _, request, steps = min(runs, key=lambda run: run[0])
    recording = Recording()
    for step in steps:
        recording.add(step)
    console.print(tokenizer.decode(request.output_tokens), markup=False)
    console.print()
    recording.show(console, f"A prompt of {len(prompt)} tokens, an answer of {len(request.output_tokens)}")
    times, tokens = request.times, len(request.output_tokens)
    if times.itl and times.ttft is not None:
        each = sum(times.itl) / len(times.itl)
        console.print(
            f"\nThe prompt's step computed {len(prompt)} tokens in {1e3 * times.ttft:.1f} ms, a step of decode one in "
            f"{1e3 * each:.1f} ms: a token of {tokens} costs {each * len(prompt) / times.ttft:.0f} times as much alone."
        )
    return 0
