"""The seven phases, and a small picture of what each adds to those above it."""

from collections.abc import Callable

from chapters.drawings.svg import Drawing

LABEL = "The seven phases, and what each adds to those above it"
LEFT, TOP, HIGH = 66, 14, 84
PAGES = "aab.bbcc.aac..bb.cc.a.bb...cca"
COLORS = {"a": "blue", "b": "green", "c": "amber", ".": "line"}
Bars = tuple[tuple[float, int, float, str], ...]  # x, lane, width, colour


def bars(drawing: Drawing, x: float, y: float, found: Bars, high: float) -> None:
    for at, lane, width, color in found:
        drawing.rect(x + at, y + lane * (high + 5), width, high, color)


def request(drawing: Drawing, x: float, y: float) -> None:
    """A prompt, and the tokens that follow it one by one."""
    bars(drawing, x, y + 18, tuple((18 * n, 0, 15, "pale" if n < 4 else "blue") for n in range(7)), 22)
    drawing.arrow(x + 128, y + 29, x + 148, y + 29)


def paged(drawing: Drawing, x: float, y: float) -> None:
    bars(drawing, x, y, tuple((15 * (n % 10), n // 10, 12, COLORS[owner]) for n, owner in enumerate(PAGES)), 15)


def prefill(drawing: Drawing, x: float, y: float) -> None:
    """One request decodes, and waits while the whole prompt of another is computed."""
    decodes = tuple((at, 1, 9.0, "green") for at in (0, 12, 99, 111, 123, 135))
    more = tuple((at, 0, 9.0, "blue") for at in (99, 111, 123, 135))
    bars(drawing, x, y + 4, ((24, 0, 72, "blue"), *decodes, *more), 22)


def chunks(drawing: Drawing, x: float, y: float) -> None:
    """The same, in three chunks: the other request gets a token with each."""
    steps = ((24, 25), (52, 25), (80, 25), (108, 9), (120, 9), (132, 9))
    rows = tuple((at, lane, width, ("blue", "green")[lane]) for at, width in steps for lane in (0, 1))
    bars(drawing, x, y + 4, ((0, 1, 9, "green"), (12, 1, 9, "green"), *rows), 22)


def tree(drawing: Drawing, x: float, y: float) -> None:
    bars(drawing, x, y + 18, tuple((18 * n, 0, 15, "violet") for n in range(4)), 22)
    for lane, color in enumerate(("blue", "green")):
        drawing.path(f"M{x + 70} {y + 29} L{x + 92} {y + 13 + 32 * lane}", "soft")
        bars(drawing, x + 92, y + 2 + 5 * lane, tuple((18 * n, lane, 15, color) for n in range(3)), 22)


def continuous(drawing: Drawing, x: float, y: float) -> None:
    """Three places in the batch: a request takes one in the step in which another leaves it."""
    lanes = ((4, "blue"), (9, "amber")), ((7, "green"), (6, "violet")), ((10, "amber"), (3, "blue"))
    for lane, row in enumerate(lanes):
        at = 0
        for steps, color in row:
            bars(drawing, x, y, tuple((11.5 * (at + n), lane, 9, color) for n in range(steps)), 15)
            at += steps


def server(drawing: Drawing, x: float, y: float) -> None:
    for lane, color in enumerate(("blue", "green", "amber")):
        drawing.rect(x, y + 3 + 20 * lane, 10, 10, color, radius=5)
        drawing.arrow(x + 13, y + 8 + 20 * lane, x + 34, y + 8 + 20 * lane)
    for at, width, words in ((34, 42, "API"), (86, 64, "engine")):
        drawing.rect(x + at, y, width, 56, "card", "violet", 6)
        drawing.text(x + at + width / 2, y + 33, words, "ink", 14, "middle", bold=True)
    drawing.path(f"M{x + 76} {y + 28} h10", "violet")


PHASES: tuple[tuple[str, str, str, Callable[[Drawing, float, float], None]], ...] = (
    ("phase0_request", "a request, token by token", "traced from end to end", request),
    ("phase1_kv_pool", "keys and values in pages", "paging ends fragmentation", paged),
    ("phase2_prefill_decode", "prefill and decode", "a long prompt stalls the others", prefill),
    ("phase3_chunked_prefill", "prompts in chunks", "the others go on in between", chunks),
    ("phase4_radix", "a tree of prefixes", "a shared prefix is computed once", tree),
    ("phase5_continuous", "continuous batching", "the batch changes every step", continuous),
    ("phase6_integration", "an OpenAI server", "the whole, under load", server),
)


def phases() -> Drawing:
    drawing = Drawing(2 * TOP + HIGH * len(PHASES), LABEL, width=480)
    for number, (name, adds, lesson, picture) in enumerate(PHASES):
        y = TOP + HIGH * number
        drawing.rect(12, y, 456, HIGH - 8, "faint", radius=8)
        if number:
            drawing.text(33, y + 2, "+", "violet", 22, "middle", bold=True)
        drawing.cell(18, y + 18, 30, 40, str(number), "violet", "on", 20)
        picture(drawing, LEFT, y + 10)
        drawing.text(232, y + 25, adds, "ink", 16, bold=True)
        drawing.text(232, y + 45, lesson, "ink", 15)
        drawing.text(232, y + 65, name, "soft", 14, mono=True)
    return drawing
