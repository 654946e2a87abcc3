"""`python -m phase1_kv_pool`: the same requests in the same memory, in contiguous blocks and in pages.

The length of an answer is not known beforehand. A block has the length of the longest request; pages are allocated one
by one.
"""

import argparse
import string

from rich.console import Console

from phase0_request.lab.report import table
from phase0_request.lab.viewer import Line, show
from phase1_kv_pool.lab.memories import ContiguousMax, KVMemory, PagedMemory
from phase1_kv_pool.lab.serving import ServingSimulator, SyntheticTrace, cells

LONGEST = 128  # tokens of a request
TRACE = SyntheticTrace(num_requests=36, median_prompt=20, mean_answer=28, max_context=LONGEST, arrival_rate=0.7)
SYMBOLS = (string.digits + string.ascii_letters).replace("x", "")  # which a line of a viewer paints as preempted
FREE, EMPTY = "·", "░"
EVERY = 8  # steps for a line


def play(memory: KVMemory, page_size: int) -> tuple[list[Line], list[object]]:
    """Serve the trace. Returns lines with a sign for each page, and the figures of the run."""
    simulator, lines, most, tokens, reserved = ServingSimulator(memory, TRACE.requests()), list[Line](), 0, 0, 0
    while simulator.unfinished:
        simulator.step()
        most, tokens = max(most, len(simulator.running)), tokens + simulator.tokens
        reserved += memory.reserved
        if simulator.steps % EVERY == 1:
            pages = cells(simulator, page_size)
            signs = [FREE if c is None else SYMBOLS[c.owner] if c.tokens else EMPTY for c in pages]
            step, used = simulator.steps, memory.reserved // page_size
            lines.append(Line(step, step, 0, len(simulator.running), used, 0.0, "".join(signs)))
    return lines, [most, simulator.steps, simulator.preemptions, f"{tokens / reserved:.0%}"]


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase1_kv_pool", description=__doc__)
    p.add_argument("--pages", type=int, default=32, help="in the memory (%(default)s)")
    p.add_argument("--page-size", type=int, default=16, help="tokens in a page (%(default)s)")
    options = p.parse_args(arguments)
    slots, console, rows = options.pages * options.page_size, Console(highlight=False), list[list[object]]()
    try:
        ways: dict[str, KVMemory] = {
            f"blocks of {LONGEST}": ContiguousMax(slots, LONGEST),
            f"pages of {options.page_size}": PagedMemory(slots, options.page_size),
        }
        for name, memory in ways.items():
            lines, figures = play(memory, options.page_size)
            show(console, f"{name}: a sign is a page, with its request; {EMPTY} is reserved and empty", lines, "pages")
            console.print()
            rows.append([name, *figures])
    except (ValueError, ZeroDivisionError) as error:
        p.error(str(error))
    console.print(table(("allocated in", "at most at once", "steps", "preempted", "slots with a token"), rows))
    return 0
