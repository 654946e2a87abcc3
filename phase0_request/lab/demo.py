"""`python -m phase0_request`: requests wait in a queue, join a batch, and get a token in every step.

The model is a mock: it replays known answers, and its steps take simulated time. So the demo takes none.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import accumulate, cycle, islice

from rich.console import Console

from phase0_request.lab.batcher import Batcher
from phase0_request.lab.metrics import percentile, summarize
from phase0_request.lab.mock_model import MockModel
from phase0_request.lab.questions import QUESTIONS
from phase0_request.lab.report import table
from phase0_request.lab.simulate import steps
from phase0_request.lab.viewer import Recording
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer


def arrivals(tokenizer: Tokenizer, count: int, rate: float, seed: int) -> list[Request]:
    """Requests at random times, `rate` of them a second, or all at once if that is 0."""
    rng = random.Random(seed)
    times = accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(count))
    prompts = [tuple(tokenizer.encode(question)) for question in islice(cycle(QUESTIONS), count)]
    return [Request(f"r{n}", prompts[n], arrival=time) for n, time in enumerate(times)]


def serve(requests: Sequence[Request], model: MockModel, batcher: Batcher) -> Recording:
    """Serve requests from their arrivals on, and record the steps."""
    recording = Recording()
    for step in steps(requests, model, batcher):
        now = step.start + step.seconds
        recording.add(step, [request for request in requests if request.arrival <= now])
    return recording


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase0_request", description=__doc__)
    p.add_argument("-n", "--num-requests", type=int, default=12, help="(%(default)s)")
    p.add_argument("-b", "--batch-size", type=int, default=4, help="requests in a step (%(default)s)")
    p.add_argument("--arrival-rate", type=float, default=8.0, metavar="R", help="a second; 0: at once (%(default)s)")
    options = p.parse_args(arguments)
    console, tokenizer = Console(highlight=False), Tokenizer.from_pretrained()
    model = MockModel.replaying(tokenizer, QUESTIONS.items())
    try:
        requests = arrivals(tokenizer, options.num_requests, options.arrival_rate, seed=0)
        recording = serve(requests, model, Batcher(tokenizer.eos_ids, options.batch_size))
    except ValueError as error:
        p.error(str(error))
    recording.show(console, f"{len(requests)} requests, at most {options.batch_size} in a step", bar="tokens")
    rows = [
        (r.id, tokenizer.decode(r.output_tokens)[:34], *(1e3 * (t or 0.0) for t in (queue, ttft, e2e)))
        for r in requests
        for queue, ttft, e2e in [(r.times.queue_time, r.times.ttft, r.times.e2e)]
    ]
    console.print("", table(("request", "answer", "queue ms", "TTFT ms", "end ms"), rows), sep="\n")
    run = summarize(requests)
    console.print(
        f"\n{run.tokens} tokens in {run.seconds:.2f} s: {run.tokens_per_second:.0f} tokens/s; "
        f"median TTFT {1e3 * percentile(run.ttft, 50):.0f} ms, ITL {1e3 * percentile(run.itl, 50):.0f} ms"
    )
    return 0
