"""`python -m phase5_continuous.lab fairness`: a greedy and a modest client on one engine, and three of equal rights.

Simulated, with the engine's scheduler: first with one queue for all, then with fair queueing. The figures are the same
on every machine.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console

from phase0_request.lab.report import finish, parser, section
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import WORD, Arrival

QUESTIONS, QUESTION = 30, (128, 48)  # of the modest client, one a second; tokens of a prompt and an answer
BURSTS, N, BURST = 16, 128, (128, 512)  # of the greedy client: requests at once, with n completions
FLOODS = {"chats": (1000, 128, 128), "documents": (1000, 1024, 32), "essays": (1000, 32, 512)}
SECONDS = 10.0  # for which the three are compared: none of them has sent less than that
QUEUES = {"one_queue": False, "fair_queueing": True}


@dataclass(frozen=True, slots=True)
class Service:
    """What the modest client gets, and what that costs the greedy one."""

    ttft_p50_ms: float  # of the modest client's questions
    ttft_max_ms: float
    greedy_seconds: float  # until the greedy client has all answers
    tokens_per_second: float  # generated, for both
    preemptions: int


def arrivals(tenant: str, times: Iterable[float], prompt: int, answer: int) -> list[Arrival]:
    """Requests of one tenant. No two prompts begin alike."""
    return [
        Arrival(time, (sum(tenant.encode()), number, *[WORD] * (prompt - 2)), answer, tenant=tenant)
        for number, time in enumerate(times)
    ]


def greedy_and_modest() -> list[Arrival]:
    """The greedy client sends all at the start, the modest one a question each second."""
    greedy = arrivals("greedy", [0.0] * (BURSTS * N), *BURST)
    modest = arrivals("modest", (1.0 + second for second in range(QUESTIONS)), *QUESTION)
    return sorted([*greedy, *modest], key=lambda arrival: arrival.time)


def floods() -> list[Arrival]:
    """Three clients that each send more than can be served."""
    return [*chain.from_iterable(arrivals(name, [0.0] * count, *size) for name, (count, *size) in FLOODS.items())]


def serve(come: Sequence[Arrival], fair: bool, seconds: float = float("inf")) -> tuple[Service, Counter[str]]:
    """Serve the arrivals, to the end or for this many seconds. Returns also the tokens computed for each tenant."""
    simulation = Simulation(come if fair else [arrival._replace(tenant="") for arrival in come], Setting())
    tenants = {f"r{number}": arrival.tenant for number, arrival in enumerate(come)}
    tokens, ttft, ended = Counter[str](), list[float](), dict.fromkeys(tenants.values(), 0.0)
    while simulation.going and simulation.clock.now < seconds:
        step = simulation.step()
        for request, _, length, _ in step.batch if step else ():
            tokens[tenants[request.id]] += length
        for event in step.events if step else ():
            if event.finish_reason is not None:
                tenant = tenants[event.request.id]
                ended[tenant] = simulation.clock.now
                if tenant == "modest":
                    ttft.append(1e3 * (event.request.times.ttft or 0.0))
    outcome = simulation.outcome()
    ttft = sorted(ttft) or [0.0]
    times = ttft[len(ttft) // 2], ttft[-1], ended.get("greedy", 0.0)
    return Service(*times, outcome.tokens_per_second, outcome.preemptions), tokens


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab fairness", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    served = {name: serve(greedy_and_modest(), fair)[0] for name, fair in QUEUES.items()}
    shares = {}
    for name, fair in QUEUES.items():
        _, tokens = serve(floods(), fair, SECONDS)
        shares[name] = {tenant: tokens[tenant] / tokens.total() for tenant in FLOODS}
    clients = f"{BURSTS} requests with n={N} at the start, and {QUESTIONS} questions of another client"
    figures = {
        "served": section(console, clients, served),
        "shares": section(console, f"Shares of the tokens of the first {SECONDS:.0f} seconds", shares, digits=3),
    }
    finish(p, options, arguments, figures)
    return 0
