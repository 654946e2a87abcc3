"""`python -m phase1_kv_pool.lab fragmentation`: what contiguous memory wastes, what pages waste, what it costs.

One trace of requests is served from one memory under every policy, with the same rules (see Serving). What is averaged
is averaged over the busy steps: those after which someone still waits, so that memory is what holds everyone up.
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

from phase0_request.machine import record
from phase1_kv_pool.lab.memories import ContiguousMax, ContiguousPow2, Memory, Pages
from phase1_kv_pool.lab.serving import Job, Serving, Trace

SLOTS = 65536
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a policy did on a trace. A slot is room for one token; a slot is reserved while a request holds it.

    In every slot of every busy step there is a token (`memory_share`), or it is reserved and empty, or nobody holds it
    although someone waits. `utilisation` is the share of the reserved slots that hold a token.
    """

    utilisation: float
    memory_share: float
    reserved_share: float
    waste_per_request: float  # reserved slots without a token, for each running request
    mean_running: float
    max_running: int  # over the whole run
    steps: int  # until everyone is done
    busy_steps: int
    preemptions: int
    recomputed_tokens: int  # tokens whose work preemptions threw away


def serve(memory: Memory, jobs: Iterable[Job]) -> Outcome:
    """Run a trace to its end. ValueError if the memory was never what held anyone up."""
    serving = Serving(memory, jobs)
    busy = tokens = reserved = running = most = 0
    while serving.unfinished:
        serving.step()
        most = max(most, len(serving.running))
        if serving.waiting:
            busy += 1
            tokens += serving.tokens
            reserved += memory.reserved
            running += len(serving.running)
    if busy == 0:
        raise ValueError(f"nobody ever waited for one of {memory.slots} slots; take more requests or less memory")
    return Outcome(
        utilisation=tokens / reserved,
        memory_share=tokens / (busy * memory.slots),
        reserved_share=reserved / (busy * memory.slots),
        waste_per_request=(reserved - tokens) / running,
        mean_running=running / busy,
        max_running=most,
        steps=serving.steps,
        busy_steps=busy,
        preemptions=serving.preemptions,
        recomputed_tokens=serving.recomputed,
    )


def policies(slots: int, longest: int, page_sizes: Iterable[int] = PAGE_SIZES) -> dict[str, Callable[[], Memory]]:
    """Every way to give out so many slots, by name, ready to be made."""
    return {
        "contiguous_max": partial(ContiguousMax, slots, longest),
        "contiguous_pow2": partial(ContiguousPow2, slots, longest),
        **{f"pages_{size}": partial(Pages, slots, size) for size in page_sizes},
    }


def study(trace: Trace, slots: int = SLOTS) -> Iterator[tuple[str, Outcome]]:
    """Every policy on the same trace."""
    jobs = trace.jobs()
    for name, make in policies(slots, trace.max_context).items():
        yield name, serve(make(), jobs)


def table(outcomes: dict[str, Outcome], width: int) -> Table:
    """A row a policy, and a bar for what the memory holds: tokens, reserved and empty, free."""
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
    parts = [("\u2588" * tokens, "green"), ("\u2592" * empty, "red"), ("\u00b7" * (width - tokens - empty), "dim")]
    return Text.assemble(*parts)


def _parser() -> argparse.ArgumentParser:
    default = Trace()
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
        trace = Trace(**options)
        ways = len(policies(slots, trace.max_context))
        outcomes = dict(track(study(trace, slots), "policies", ways, console=console, transient=True))
    except ValueError as error:
        p.error(str(error))
    jobs = trace.jobs()
    means = [sum(job.prompt for job in jobs) / len(jobs), sum(job.length for job in jobs) / len(jobs)]
    console.print(
        f"{len(jobs):,} requests, prompts of {means[0]:.0f} tokens on average, with their answers {means[1]:.0f}, "
        f"{trace.max_context:,} at most; {slots:,} slots"
    )
    console.print(
        Text.assemble("memory: ", ("\u2588", "green"), " tokens  ", ("\u2592", "red"), " reserved, empty  \u00b7 free")
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
