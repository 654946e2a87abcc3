"""`python -m phase1_kv_pool.lab fragmentation`: the memory that contiguous blocks waste, and that pages waste.

Every policy serves the same trace from the same memory, with the rules of ServingSimulator. Averages are over the busy
steps: those after which a request still waits, so that memory limits the batch.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase0_request.lab.record import record
from phase1_kv_pool.lab.memories import ContiguousMax, ContiguousPow2, KVMemory, PagedMemory
from phase1_kv_pool.lab.serving import ServingSimulator, SyntheticTrace, TraceRequest

SLOTS = 65536
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)


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


def table(outcomes: dict[str, Outcome], width: int) -> Table:
    """A row for each policy, with a bar of the memory: slots with tokens, reserved and empty slots, free slots."""
    bar = max(10, min(40, width - 67))  # the other columns take 67
    shown = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("\npolicy", width=15)
    shown.add_column("\nmemory", width=bar)
    for name in (
        "of\nreserved",
        "of\nmemory",
        "empty a\nrequest",
        "at once\nmean",
        "\nmost",
        "\nsteps",
        "pre-\nempted",
    ):
        shown.add_column(name, justify="right")
    for name, o in outcomes.items():
        shown.add_row(
            name.replace("_", " "),
            _bar(o, bar),
            f"{o.utilisation:.1%}",
            f"{o.memory_share:.1%}",
            f"{o.waste_per_request:.1f}",
            f"{o.mean_running:.1f}",
            str(o.max_running),
            f"{o.steps:,}",
            f"{o.preemptions:,}",
        )
    return shown


def _bar(outcome: Outcome, width: int) -> Text:
    tokens = round(outcome.memory_share * width)
    empty = round(outcome.reserved_share * width) - tokens
    parts = [("\u2588" * tokens, palette.IN_USE), ("\u2592" * empty, palette.WASTED)]
    return Text.assemble(*parts, ("\u00b7" * (width - tokens - empty), palette.FREE))


def _parser() -> argparse.ArgumentParser:
    default = SyntheticTrace()
    p = argparse.ArgumentParser(prog="python -m phase1_kv_pool.lab fragmentation", description=__doc__)
    p.add_argument("-n", "--num-requests", type=int, default=default.num_requests, help="(%(default)s)")
    p.add_argument("--slots", type=int, default=SLOTS, help="tokens that fit in the memory (%(default)s)")
    p.add_argument(
        "--max-context", type=int, default=default.max_context, help="longest request, a power of two (%(default)s)"
    )
    p.add_argument("--median-prompt", type=int, default=default.median_prompt, help="in tokens (%(default)s)")
    p.add_argument("--mean-answer", type=int, default=default.mean_answer, help="in tokens (%(default)s)")
    p.add_argument("--seed", type=int, default=default.seed, help="of the lengths (%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return p


def main(arguments: list[str] | None = None) -> int:
    p = _parser()
    options = vars(p.parse_args(arguments))
    file: Path | None = options.pop("json")
    command = " ".join([p.prog, *(f"--{name.replace('_', '-')} {value}" for name, value in options.items())])
    slots: int = options.pop("slots")
    console = Console()
    try:
        trace = SyntheticTrace(**options)
        ways = len(policies(slots, trace.max_context))
        outcomes = dict(track(study(trace, slots), "policies", ways, console=console, transient=True))
    except ValueError as error:
        p.error(str(error))
    requests = trace.requests()
    means = [sum(r.prompt for r in requests) / len(requests), sum(r.length for r in requests) / len(requests)]
    console.print(
        f"{len(requests):,} requests, prompts of {means[0]:.0f} tokens on average, with their answers {means[1]:.0f}, "
        f"{trace.max_context:,} at most; {slots:,} slots"
    )
    console.print(
        Text.assemble(
            "memory: ",
            ("\u2588", palette.IN_USE),
            " tokens  ",
            ("\u2592", palette.WASTED),
            " reserved, empty  \u00b7 free",
        )
    )
    console.print("", table(outcomes, console.width), sep="\n")
    if file is not None:
        figures = {
            "trace": asdict(trace) | {"slots": slots, "mean_prompt": means[0], "mean_length": means[1]},
            "policies": {name: asdict(outcome) for name, outcome in outcomes.items()},
        }
        record(file, command, figures)
        console.print(f"\nFigures written to {file}")
    return 0
