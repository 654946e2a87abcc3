"""The lines of a record, as a recorder writes them and as its readers need them."""

from collections.abc import Callable
from typing import Any

VERSION = 1

Line = dict[str, Any]


class Vocabulary:
    """Adds the text of tokens to lines that have their ids: in each line, of those that occur for the first time."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self._known: set[int] = set()

    def add(self, line: Line) -> Line:
        lists = [new.get("tokens", ()) for new in line.get("new", ())]
        lists += [operation[3] for operation in line.get("pages", ()) if operation[0] == "store" and len(operation) > 3]
        unknown = {*line.get("ids", ())}.union(*lists) - self._known
        if unknown:
            self._known |= unknown
            line["vocab"] = {str(token): self._text(token) for token in sorted(unknown)}
        return line
