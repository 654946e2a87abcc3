"""Parts of the text that are written by the code they describe: `<!-- generated: NAME -->` owns the lines up to
`<!-- /generated -->`."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

from chapters import plan
from chapters.core_files import core_files
from chapters.course import Course
from chapters.ledger import ledger
from chapters.tables import lines

RESULTS = Path(__file__).parent / "results"


def flags() -> list[str]:
    """The flags of `nanoserve serve`, by group."""
    from phase0_request.support.flags import Parser
    from phase6_integration.serve_flags import add_flags

    parser = Parser(prog="nanoserve serve")
    add_flags(parser)
    lines: list[str] = []
    for group in ("engine", "server"):
        lines += [f"| flag: {group} | default in parentheses |", "|---|---|"]
        lines += [f"| {_invocation(action)} | {_cell(action.help or '')} |" for action in actions_of(parser, group)]
        lines.append("")
    return lines[:-1]


def actions_of(parser: argparse.ArgumentParser, group: str) -> Sequence[argparse.Action]:
    (found,) = (each for each in parser._action_groups if each.title == group)
    return found._group_actions


def _invocation(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


PEERS = {"llama": "llama.cpp", "vllm": "vLLM", "transformers": "transformers", "ours_float32": "ours, float32"}
QUANTIZED = "Q8_0", "Q4_0", "Q4_K_M"


PROCESSORS = "peers.json", "peers_zen4.json"  # the comparison on each
AGAINST = {
    "llama.cpp, bfloat16": ("ours", "llama"),
    "vLLM, bfloat16": ("ours", "vllm"),
    **{f"llama.cpp, {kind}": (f"ours_{kind}", f"llama_{kind}") for kind in QUANTIZED},
}


def in_words(load: str) -> str:
    """A workload as readers know it: "8 chats" for 8x128+64."""
    count, prompt, answer = map(int, re.split(r"[x+]", load))
    if answer == 1:
        return f"{count} long prompts"
    return f"{count} chat{'s' * (count > 1)}" + (f" after {prompt - 1:,} tokens" if prompt > 4096 else "")


def processors() -> list[str]:
    """The larger model on every processor where it was measured beside others: our rate, and multiples of theirs."""
    loads = "1x16+64", "8x128+32", "4x512+1"
    lines = [f"| 596M model | {' | '.join(map(in_words, loads))} |", "|---" * 4 + "|"]
    for file in PROCESSORS:
        result = json.loads((RESULTS / file).read_text("utf-8"))
        rows = [result["figures"]["native"]["596m"][load] for load in loads]
        lines.append(f"| **{result['device']}**, {result['machine']['vectors']} | | | |".replace("(R)", ""))
        lines.append(f"| ours, bfloat16, tokens/s | {' | '.join(_rate(row, 'ours') for row in rows)} |")
        for title, pair in AGAINST.items():
            lines.append(f"| over {title} | {' | '.join(_over(row, *pair) for row in rows)} |")
    return lines


def _over(row: Mapping[str, Any], ours: str, other: str) -> str:
    """Our rate as a multiple of the other's. Bold where the other is faster."""
    ratio = row[ours]["median"] / row[other]["median"]
    return f"{ratio:.2f}x" if ratio >= 1 else f"**{ratio:.2f}x**"


def peers(isa: str, file: str = "peers.json") -> list[str]:
    """This engine beside others, with one set of vector instructions: rates in bfloat16, then of quantized weights."""
    from phase6_integration.lab.peers.compare import in_order

    shapes = json.loads((RESULTS / file).read_text("utf-8"))["figures"][isa]
    rows = {
        f"{shape.upper()}, {in_words(load)}": its[load]
        for shape, its in shapes.items()
        for load in in_order(shape, its)
    }
    present = {name: title for name, title in PEERS.items() if any(name in row for row in rows.values())}
    lines = [
        f"| bfloat16, tokens/s | ours | {' | '.join(present.values())} |",
        "|---|---" + "|---" * len(present) + "|",
    ]
    for name, row in rows.items():
        others = (_beside(row, "ours", other) for other in present)
        lines.append(f"| {name} | **{_rate(row, 'ours')}** | {' | '.join(others)} |")
    titles = (f"ours | llama.cpp, {name}" for name in QUANTIZED)
    lines += ["", f"| quantized, tokens/s | {' | '.join(titles)} |", "|---" * (2 * len(QUANTIZED) + 1) + "|"]
    for name, row in rows.items():
        pairs = [(f"ours_{kind}", f"llama_{kind}") for kind in QUANTIZED]
        if all(engine in row for pair in pairs for engine in pair):
            cells = (f"**{_rate(row, ours)}** | {_beside(row, ours, other)}" for ours, other in pairs)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def beside(name: str) -> list[str]:
    """This project beside others: rows where it leads, and rows where it does not."""
    from chapters import bugs, exercises
    from phase6_integration.support.named_models import families

    here = Course.here()
    counts = {"exercises": _tens(exercises.every(here)), "bugs": _tens(bugs.every(here)), "models": _tens(families())}
    rows = [line.format(**_sizes(), **counts) for line in lines(RESULTS.parent, "README", name)]
    return [rows[0], "|---" * (rows[0].count("|") - 1) + "|", *rows[1:]]


def _sizes() -> dict[str, int]:
    """The lines of the core, and of all that `nanoserve serve` can load, as `make house` counts them, in hundreds."""
    house = run_path(str(RESULTS.parents[1] / ".ci/house.py"))
    modules = {"core": house["core"](r"phase.*core.*|server, core"), "all": house["reached"](house["SERVE"])}
    return {name: round(house["lines"](its), -2) for name, its in modules.items()}


def _tens(things: Sized) -> int:
    """How many there are, in full tens: so one more rarely changes the README."""
    return len(things) // 10 * 10


def _rate(row: Mapping[str, Any], engine: str) -> str:
    rate = row[engine]["median"]
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _beside(row: Mapping[str, Any], ours: str, other: str) -> str:
    """The other's rate, and ours as a multiple of it."""
    return f"{_rate(row, other)} ({row[ours]['median'] / row[other]['median']:.2f}x)" if other in row else ""


GENERATED: dict[str, Callable[[], list[str]]] = {
    "core": core_files,
    "flags": flags,
    "ledger": ledger,
    "part one": plan.part_one,
    "part two": plan.part_two,
    **{name: partial(beside, name) for name in ("beside", "beside in use")},
    "processors": processors,
    "peers": lambda: peers("native"),
    "peers with AVX2": lambda: peers("avx2"),
    "peers on an AMD EPYC": lambda: peers("native", "peers_zen4.json"),
}
