"""Replay: rebuilds the state of an engine from the lines of a record: its requests, page tables and tree."""

from collections import Counter
from dataclasses import dataclass, field

from phase5_continuous.extras.record.lines import VERSION, Line

OPERATIONS = "attach", "grow", "swap", "free", "store", "evict"  # on pages


@dataclass(slots=True)
class RecordedRequest:
    """A request of a record, up to the line that was applied last."""

    id: str
    prompt: int
    max_tokens: int
    state: str = "waiting"  # running, preempted, or why it has ended
    output: int = 0  # tokens
    tokens: list[int] = field(default_factory=list)  # prompt and output, in a record with text
    tenant: str = ""
    error: str | None = None


@dataclass(slots=True)
class Replay:
    """Apply the lines of a record in order. The state is the engine's at the time when the last of them was written."""

    header: Line = field(default_factory=dict)
    line: Line = field(default_factory=dict)  # the last one
    requests: dict[int, RecordedRequest] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)  # the pages of each request that has some
    tree: dict[int, int | None] = field(default_factory=dict)  # each cached page, and the one before it
    tokens: dict[int, list[int]] = field(default_factory=dict)  # of each cached page, in a record with text

    def apply(self, line: Line) -> None:
        """Advance by a line."""
        if "record" in line:
            if line["record"] != VERSION:
                raise ValueError(f"this is a record of version {line['record']!r}; only {VERSION} can be read")
            self.header = line
            return
        if line.get("snapshot"):
            for old in (self.requests, self.tables, self.tree, self.tokens):
                old.clear()
        self.line = line
        for new in line.get("new", ()):
            tokens = new.get("tokens", ())
            self.requests[new["r"]] = RecordedRequest(
                new["id"], new["prompt"], new["max"], output=new.get("output", 0), tokens=[*tokens],
                tenant=new.get("tenant", ""),
            )  # fmt: skip
        for operation, *given in line.get("pages", ()):
            if operation not in OPERATIONS:
                raise LookupError(f"no operation is named {operation!r}")
            getattr(self, f"_{operation}")(*given)
        for number, _ in line.get("preempted", ()):
            if number not in self.tables:  # else it runs again already
                self.requests[number].state = "preempted"
        for place, number in enumerate(line.get("out", ())):
            self.requests[number].output += 1
            if "ids" in line:
                self.requests[number].tokens.append(line["ids"][place])
        for number, reason, *error in line.get("done", ()):
            self.requests[number].state = reason
            self.requests[number].error = error[0] if error else None

    def _attach(self, number: int, pages: list[int]) -> None:
        self.tables[number] = [*pages]
        self.requests[number].state = "running"

    def _grow(self, number: int, pages: list[int]) -> None:
        self.tables[number] += pages

    def _swap(self, number: int, first: int, pages: list[int]) -> None:
        self.tables[number][first : first + len(pages)] = pages

    def _free(self, number: int) -> None:
        del self.tables[number]

    def _store(self, parent: int | None, pages: list[int], tokens: list[int] | None = None) -> None:
        size = self.header["page_size"]
        for place, page in enumerate(pages):
            self.tree[page] = pages[place - 1] if place else parent
            if tokens is not None:
                self.tokens[page] = tokens[place * size : (place + 1) * size]

    def _evict(self, pages: list[int]) -> None:
        for page in pages:
            del self.tree[page]
            self.tokens.pop(page, None)

    def counts(self) -> Counter[int]:
        """The references of each page, by the tables that name it and by the tree. Pages without any are free."""
        return Counter([page for table in self.tables.values() for page in table]) + Counter(self.tree.keys())
