"""Claims: what a sentence says about figures ("twice", "at least", "grows"), checked against the result files.

A claim stands before its sentence, in the Markdown of a chapter or of a notebook:

    <!-- claim: phase4.json#served.ttft_ratio >= 5 and #served.on.hit_rate > 0.8 -->
    <!-- claim: grows(phase0.json#batching.*.tokens_per_second) -->
    <!-- claim: above.1 > 2 * above.0 -->

`file.json#dotted.key` is a figure of a result, `#dotted.key` one of the file named before. With `*` for a part of the
key it is all that match, in the order of the numbers in their names. In a notebook, `above.1` is number 1, counted from
0, that the nearest cell above printed. Spaces separate them from what follows. The rest is an expression of Python with
the functions grows, falls, min, max and abs.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from chapters.course import Course

CLAIM = re.compile(r"<!-- claim: (.+?) -->", re.DOTALL)
REFERENCE = re.compile(r"([\w-]+\.json)?#([^\s,()]+)|\babove\.(\d+)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def grows(*values: Any) -> bool:
    """Whether each of these figures, or of one list of them, is above the one before."""
    return all(a < b for a, b in pairwise(values[0] if len(values) == 1 else values))


def falls(*values: Any) -> bool:
    return grows(*reversed(values[0] if len(values) == 1 else values))


FUNCTIONS = {"grows": grows, "falls": falls, "min": min, "max": max, "abs": abs}


class ClaimError(Exception):
    """A figure that is not there."""


def false_claims(course: Course) -> list[str]:
    """Every claim of the chapters, the README and the notebooks that is not true, and where it stands."""
    found = []
    for path in (*course.documents(), *course.notebooks()):
        for claim, above in _claims(path):
            try:
                if not evaluate(claim, course.results, above):
                    found.append(f"{course.name(path)}: not true: {claim}")
            except (ClaimError, SyntaxError, NameError, TypeError) as error:
                found.append(f"{course.name(path)}: {error}: {claim}")
    return found


def evaluate(claim: str, results: Path, above: Sequence[float] = ()) -> bool:
    """Whether a claim is true. ClaimError if a figure is missing."""
    values: dict[str, Any] = {}
    file = ""

    def named(match: re.Match[str]) -> str:
        nonlocal file
        name = f"_{len(values)}"
        if match[3] is not None:
            if int(match[3]) >= len(above):
                raise ClaimError(f"the cell above printed {len(above)} numbers")
            values[name] = above[int(match[3])]
        else:
            file = match[1] or file
            found = figures(results / file, match[2])
            values[name] = found if "*" in match[2] else found[0]
        return name

    expression = REFERENCE.sub(named, " ".join(claim.split()))
    return bool(eval(expression, {"__builtins__": {}}, FUNCTIONS | values))


def _claims(path: Path) -> Iterator[tuple[str, Sequence[float]]]:
    """The claims of a file, and in a notebook the numbers that the nearest cell above each of them printed."""
    text = path.read_text("utf-8")
    if path.suffix != ".ipynb":
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        yield from ((claim, ()) for claim in CLAIM.findall(prose))
        return
    above: Sequence[float] = ()
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            yield from ((claim, above) for claim in CLAIM.findall("".join(cell["source"])))
        elif cell["cell_type"] == "code":
            lines = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
            printed = re.sub(r"<Figure[^>]*>", "", "\n".join("".join(line) for line in lines))
            above = [float(number.replace(",", "")) for number in NUMBER.findall(printed)] or above


def figures(result: Path, key: str) -> list[Any]:
    """The numbers or texts at a dotted key of a result: of its `figures`, or of the whole file. One, unless the key has
    a `*`."""
    if not result.is_file():
        raise ClaimError(f"there is no result {result.name}")
    document = json.loads(result.read_text("utf-8"))
    found = list(_at(document["figures"], key)) or list(_at(document, key))
    if not found or not all(isinstance(value, str | int | float) for value in found):
        raise ClaimError(f"{result.name} has no number or text at '{key}'")
    return found


def _at(value: Any, key: str) -> Iterator[Any]:
    """The values at a dotted key. The last part may contain dots: figures may be named after methods."""
    first, _, rest = key.partition(".")
    if not key:
        yield value
    elif isinstance(value, list) and first.isdecimal() and int(first) < len(value):
        yield from _at(value[int(first)], rest)
    elif isinstance(value, dict) and key in value:
        yield value[key]
    elif isinstance(value, dict):
        names = [name for name in value if re.fullmatch(re.escape(first).replace(r"\*", ".*"), name)]
        for name in sorted(names, key=lambda name: [float(part) for part in re.findall(r"\d+", name)]):
            yield from _at(value[name], rest)
