"""`python -m phase1_kv_pool.lab fragmentation`: the memory that contiguous blocks waste, and that pages waste.

Every policy serves the same trace from the same memory, with the rules of ServingSimulator. Averages are over the busy
steps: those after which a request still waits, so that memory limits the batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import add_fields, finish, parser, section
from phase1_kv_pool.lab.memories import ContiguousMax, ContiguousPow2, KVMemory, PagedMemory
from phase1_kv_pool.lab.serving import ServingSimulator, SyntheticTrace, TraceRequest

SLOTS = 65536
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
SHOWN = ("utilisation", "memory_share", "waste_per_request", "mean_running", "steps", "preemptions")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one policy on a trace. A slot holds one token; it is reserved while it is allocated to a request.

    In a busy step a slot holds a token (`memory_share`), or is reserved and empty (internal fragmentation), or is free
    although a request waits (external fragmentation). `utilisation` is the share of reserved slots with a token.
    """

    utilisation: float
    memory_share: float
    reserved_share: float
    waste_per_request: float  # reserved slots without a token, for each running request
    mean_running: float
    max_running: int  # over the whole run
    steps: int  # until every request has finished
    busy_steps: int
    preemptions: int
    recomputed_tokens: int  # tokens computed again because of preemptions


def serve(memory: KVMemory, requests: Iterable[TraceRequest]) -> Outcome:
    """Run a trace to its end. ValueError if no request ever had to wait for memory."""
    simulator = ServingSimulator(memory, requests)
    busy = tokens = reserved = running = most = 0
    while simulator.unfinished:
        simulator.step()
        most = max(most, len(simulator.running))
        if simulator.waiting:
            busy += 1
            tokens += simulator.tokens
            reserved += memory.reserved
            running += len(simulator.running)
    if busy == 0:
        raise ValueError(f"no request ever waited for one of {memory.slots} slots; take more requests or less memory")
    return Outcome(
        utilisation=tokens / reserved,
        memory_share=tokens / (busy * memory.slots),
        reserved_share=reserved / (busy * memory.slots),
        waste_per_request=(reserved - tokens) / running,
        mean_running=running / busy,
        max_running=most,
        steps=simulator.steps,
        busy_steps=busy,
        preemptions=simulator.preemptions,
        recomputed_tokens=simulator.recomputed,
    )


def policies(slots: int, longest: int, page_sizes: Iterable[int] = PAGE_SIZES) -> dict[str, Callable[[], KVMemory]]:
    """A factory for each policy by name, for a memory of `slots` slots."""
    return {
        "contiguous_max": partial(ContiguousMax, slots, longest),
        "contiguous_pow2": partial(ContiguousPow2, slots, longest),
        **{f"pages_{size}": partial(PagedMemory, slots, size) for size in page_sizes},
    }


def study(trace: SyntheticTrace, slots: int = SLOTS) -> Iterator[tuple[str, Outcome]]:
    """Run every policy on the same trace."""
    requests = trace.requests()
    for name, make in policies(slots, trace.max_context).items():
        yield name, serve(make(), requests)


def main(arguments: list[str] | None = None) -> int:
    default = SyntheticTrace()
    p = parser("phase1_kv_pool.lab fragmentation", __doc__)
    p.add_argument("-n", "--num-requests", type=int, default=default.num_requests, help="(%(default)s)")
    p.add_argument("--slots", type=int, default=SLOTS, help="tokens that fit in the memory (%(default)s)")
    fields = {"max_context": "a power of two", "median_prompt": "in tokens", "mean_answer": "in tokens"}
    add_fields(p, default, fields)
    options, console = p.parse_args(arguments), Console(highlight=False)
    given = vars(options)
    try:
        trace = SyntheticTrace(**{name: given[name] for name in given if name not in ("slots", "json")})
        ways = len(policies(options.slots, trace.max_context))
        outcomes = dict(track(study(trace, options.slots), "policies", ways, console=console, transient=True))
    except ValueError as error:
        p.error(str(error))
    requests = trace.requests()
    prompt, length = fmean(r.prompt for r in requests), fmean(r.length for r in requests)
    console.print(
        f"{len(requests):,} requests, prompts of {prompt:.0f} tokens on average, with their answers {length:.0f}, "
        f"{trace.max_context:,} at most; {options.slots:,} slots\n"
    )
    figures = {
        "trace": asdict(trace) | {"slots": options.slots, "mean_prompt": prompt, "mean_length": length},
        "policies": section(console, "While requests wait for memory", outcomes, digits=2, shown=SHOWN),
    }
    finish(p, options, arguments, figures)
    return 0
