"""`python -m phase6_integration.lab event_cost`: what KV events take of a step, with a router that reads them.

Only the prefix cache runs, with the calls that a scheduler makes for it. The time is that of `publish`, in which the
cache tells its observers, and of `flush`, which sends the batch of a step.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import zmq
from rich.console import Console

from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase4_radix.prefix_cache import PrefixCache
from phase6_integration.extras.kv_events.kv_events import KVEventPublisher
from phase6_integration.extras.kv_events.kv_events_options import KVEventsConfig

PAGE = 16
RUNNING, STEPS = 256, 64  # decoding requests, of which one in 16 fills a page in a step
PROMPT = 8192  # tokens that one step computes
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of a step, and the bytes that are sent after it."""

    silent: float
    publishing: float
    bytes: float


@contextmanager
def events(cache: PrefixCache, wanted: bool) -> Iterator[tuple[KVEventPublisher | None, "zmq.Socket[bytes] | None"]]:
    """A publisher with one subscriber, which has heard of the start; or none."""
    if not wanted:
        yield None, None
        return
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context, context.socket(zmq.XSUB) as subscriber:
        publisher = KVEventPublisher(cache, KVEventsConfig(endpoint=f"ipc://{directory}/events", hwm=STEPS + 2))
        subscriber.connect(f"ipc://{directory}/events")
        subscriber.send(b"\x01")  # all topics
        while not subscriber.poll(1):  # the subscription arrives after a moment
            publisher.removed([])
            publisher.flush()
        while subscriber.poll(10):
            subscriber.recv_multipart()
        yield publisher, subscriber
        publisher.close()


def cost(prompts: int, length: int, steps: int) -> Cost:
    """The best of the rounds, of each the median step: requests compute their prompts, then decode for some steps.
    Without decodes, a step has the prompts only."""
    best, size = {False: float("inf"), True: float("inf")}, 0.0
    for _ in range(ROUNDS):
        for wanted in best:
            cache = PrefixCache(prompts * ((length + steps) // PAGE + 1), PAGE)
            requests = [admitted(cache, number, length, steps) for number in range(prompts)]
            with events(cache, wanted) as (publisher, subscriber):
                spent = [step(cache, requests, publisher)]
                for _ in range(steps):
                    for request in requests:
                        request.append(request.total, 0.0)
                        cache.grow(request, request.total)
                        request.advance(request.computed, 1)
                    spent.append(step(cache, requests, publisher))
                if subscriber is not None:
                    received = [subscriber.recv_multipart() for _ in range(steps + 1)]
                    size = median(sum(map(len, message)) for message in received[-(steps or 1) :])
            best[wanted] = min(best[wanted], median(spent[-(steps or 1) :]) * 1e6)
    return Cost(best[False], best[True], size)


def admitted(cache: PrefixCache, number: int, length: int, steps: int) -> Request:
    """A request with a computed prompt that is not published; each fills its page in another step."""
    tokens = tuple(range(number, number + length - number % PAGE))
    request = Request(f"r{number}", tokens, SamplingParams(max_tokens=steps + 1))
    request.admit(0.0)
    cache.attach(request)
    cache.grow(request, request.total)
    request.advance(0, request.total)
    return request


def step(cache: PrefixCache, requests: list[Request], publisher: KVEventPublisher | None) -> float:
    start = time.perf_counter()
    for request in requests:
        cache.publish(request)
    if publisher is not None:
        publisher.flush()
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab event_cost", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    costs = {f"decode_{RUNNING}": cost(RUNNING, 4 * PAGE, STEPS), f"prompt_{PROMPT}": cost(1, PROMPT, 0)}
    figures = section(console, "Microseconds of a step in `publish`, without and with KV events", costs, digits=1)
    finish(p, options, arguments, {"steps": figures})
    return 0
