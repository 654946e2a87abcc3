"""Claims: what a sentence says about figures ("twice", "at least", "grows"), checked against the result files.

A claim stands before its sentence, in the Markdown of a chapter or of a notebook:

    <!-- claim: phase4.json#served.ttft_ratio >= 5 and #served.on.hit_rate > 0.8 -->
    <!-- claim: grows(phase0.json#batching.*.tokens_per_second) -->
    <!-- claim: above.1 > 2 * above.0 -->

`file.json#dotted.key` is a figure of a result, `#dotted.key` one of the file named before. With `*` for a part of the
key it is all that match, in the order of the numbers in their names. In a notebook, `above.1` is number 1, counted from
0, that the nearest cell above printed. Spaces separate them from what follows. Around them: comparisons, arithmetic,
`and`, `or`, `not`, and the functions grows, falls, min, max and abs.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from chapters.course import Course

CLAIM = re.compile(r"<!-- claim: (.+?) -->", re.DOTALL)
REFERENCE = re.compile(r"([\w-]+\.json)?#([^\s,()]+)|\babove\.(\d+)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
Values = float | list[float]
OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[list[float]], float | bool]] = {
    "grows": lambda values: all(a < b for a, b in pairwise(values)),
    "falls": lambda values: all(a > b for a, b in pairwise(values)),
    "min": min,
    "max": max,
    "abs": lambda values: abs(values[0]),
}


class ClaimError(Exception):
    """A claim that cannot be evaluated."""


def false_claims(course: Course) -> list[str]:
    """Every claim of the chapters, the README and the notebooks that is not true, and where it stands."""
    found = []
    for path in (*course.documents(), *course.notebooks()):
        for claim, above in _claims(path):
            try:
                if not evaluate(claim, course.results, above):
                    found.append(f"{course.name(path)}: not true: {claim}")
            except (ClaimError, SyntaxError) as error:
                found.append(f"{course.name(path)}: {error}: {claim}")
    return found


def evaluate(claim: str, results: Path, above: Sequence[float] = ()) -> bool:
    """Whether a claim is true. ClaimError if a figure is missing, or if it uses what claims may not."""
    values: dict[str, Values] = {}
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
            values[name] = _figures(results / file, match[2])
        return name

    expression = REFERENCE.sub(named, " ".join(claim.split()))
    return bool(_evaluate(ast.parse(expression, mode="eval").body, values))


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


def _figures(path: Path, key: str) -> Values:
    """The figure at a dotted key, or a list of those that a key with `*` matches."""
    if not path.is_file():
        raise ClaimError(f"there is no result {path.name}")
    found = list(_at(json.loads(path.read_text("utf-8"))["figures"], key))
    if not found or not all(isinstance(value, int | float) for value in found):
        raise ClaimError(f"{path.name} has no number at '{key}'")
    return found if "*" in key else found[0]


def _at(value: Any, key: str) -> Iterator[Any]:
    """The values at a dotted key. The last part may contain dots: figures may be named after methods."""
    if not key:
        yield value
    elif isinstance(value, dict):
        if key in value:
            yield value[key]
            return
        first, _, rest = key.partition(".")
        names = [name for name in value if re.fullmatch(re.escape(first).replace(r"\*", ".*"), name)]
        for name in sorted(names, key=lambda name: [float(part) for part in re.findall(r"\d+", name)]):
            yield from _at(value[name], rest)


def _evaluate(node: ast.expr, values: dict[str, Values]) -> Any:
    """The value of an expression of numbers. No name, call or operator is known but those above."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.BoolOp(op=op, values=parts):
            each = [bool(_evaluate(part, values)) for part in parts]
            return all(each) if isinstance(op, ast.And) else any(each)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in OPERATIONS for op in ops):
            sides = [_evaluate(side, values) for side in (left, *others)]
            return all(OPERATIONS[type(op)](a, b) for op, (a, b) in zip(ops, pairwise(sides), strict=True))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            given = [_evaluate(argument, values) for argument in arguments]
            return FUNCTIONS[name](given[0] if len(given) == 1 and isinstance(given[0], list) else given)
    raise ClaimError(f"a claim may not contain `{ast.unparse(node)}`")
