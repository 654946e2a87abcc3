"""The engine at work, as a picture that moves: the queue, the slices of each step, and the pages of the pool."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple, TypeVar

from chapters.drawings.svg import Drawing
from phase0_request.request import Request, RequestState
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import Arrival

T = TypeVar("T")
SECONDS = 0.8  # of a step
POSTER = 5  # the step with which it begins, and that is shown where nothing moves
COLORS = {"A": "blue", "B": "green", "C": "amber", "D": "violet", "E": "red"}
SYSTEM = tuple(range(900, 908))  # the prompt with which all but C begin: two pages
PROMPTS = ((0.0, SYSTEM, 7, 12), (0.0, SYSTEM, 11, 7), (0.012, (), 38, 8), (0.02, SYSTEM, 5, 10), (0.05, SYSTEM, 9, 6))
SETTING = Setting(pages=24, page_size=4, max_running=4, chunk=10, budget=14, max_tokens=16)
TITLES = {"requests: prompt, answer": (18, 30), "the step": (18, 214), "the pool of KV pages": (398, 30)}
LANE, BAR, PAGE = 31, 24, 35  # a request's row; a token in the step; a page in the pool
LABEL = "Five requests: which tokens each step computes, and which pages of the pool hold their keys and values"


class Lane(NamedTuple):
    """A request during one step. Without a state it has not arrived yet."""

    state: str = ""
    computed: int = 0  # tokens
    prompt: int = 0
    total: int = 0


class Frame(NamedTuple):
    """What is to be seen during one step."""

    lanes: tuple[Lane, ...]
    step: tuple[str, ...]  # the request of each token that is computed
    pages: tuple[str, ...]  # of each page: the request that holds it, or what else it is


def frames() -> list[Frame]:
    """Serve the requests with the engine's scheduler and cache, and record each step."""
    arrivals = [
        Arrival(time, system + tuple(100 * number + at for at in range(own)), answer)
        for number, (time, system, own, answer) in enumerate(PROMPTS, 1)
    ]
    simulation = Simulation(arrivals, SETTING)
    requests: dict[str, Request] = {}
    recorded: list[Frame] = []
    cache = simulation.scheduler.cache
    assert isinstance(cache, PrefixCache)
    while simulation.going:
        step = simulation.step()
        if step is None or not step.batch:
            continue
        for request, *_ in step.batch:
            requests[list(COLORS)[int(request.id[1:])]] = request
        names = {request.id: name for name, request in requests.items()}
        computed = tuple(names[request.id] for request, _, length, _ in step.batch for _ in range(length))
        lanes = tuple(lane(requests.get(name), name in computed) for name in COLORS)
        recorded.append(Frame(lanes, computed, pages(cache, requests)))
    return recorded


def lane(request: Request | None, takes_part: bool) -> Lane:
    if request is None:
        return Lane()
    state = "running" if takes_part else "preempted" if request.state is RequestState.PREEMPTED else "waiting"
    prompt = len(request.prompt_tokens)
    return Lane("done" if request.finished else state, request.computed, prompt, request.total)


def pages(cache: PrefixCache, requests: dict[str, Request]) -> tuple[str, ...]:
    """Of each page: the request that holds it, "shared" by several, "cached" in the tree for later ones, or "free"."""
    looks = ["free"] * SETTING.pages
    for node in nodes_of(cache.tree):
        for page in node.pages:
            looks[page] = "cached"
    for name, request in requests.items():
        for page in () if request.finished else cache.table(request):
            looks[page] = name if looks[page] in ("free", "cached") else "shared"
    return tuple(looks)


class Film(Drawing):
    """A drawing in which shapes are visible during some of its frames, again and again."""

    def __init__(self, height: int, label: str, frames: int) -> None:
        super().__init__(height, label)
        self.frames = frames

    @contextmanager
    def during(self, first: int, stop: int) -> Iterator[None]:
        """Show what is drawn inside from frame `first` to the one before `stop`."""
        before, shown = len(self._shapes), "visible" if first <= POSTER < stop else "hidden"
        yield
        if (first, stop) == (0, self.frames):
            return
        times = {0.0: "visible" if first == 0 else "hidden", first / self.frames: "visible"}
        times |= {stop / self.frames: "hidden"} if stop < self.frames else {}
        self._shapes[before:] = [
            f'<g visibility="{shown}"><animate attributeName="visibility" dur="{SECONDS * self.frames:g}s" '
            f'begin="-{SECONDS * POSTER:g}s" repeatCount="indefinite" calcMode="discrete" '
            f'values="{";".join(times.values())}" '
            f'keyTimes="{";".join(f"{time:.4g}" for time in times)}"/>',
            *self._shapes[before:],
            "</g>",
        ]


def runs(values: Iterable[T]) -> Iterator[tuple[T, int, int]]:
    """Equal neighbours as (value, first, stop)."""
    first = 0
    for value, group in groupby(values):
        stop = first + len(list(group))
        yield value, first, stop
        first = stop


def film() -> Drawing:
    """Every step of the five requests."""
    recorded = frames()
    drawing = Film(326, LABEL, len(recorded))
    for title, (left, top) in TITLES.items():
        drawing.text(left, top, title, size=15, bold=True)
    for number, name in enumerate(COLORS):
        _lane(drawing, name, 42 + LANE * number, [frame.lanes[number] for frame in recorded])
    _step(drawing, [frame.step for frame in recorded])
    _pool(drawing, [frame.pages for frame in recorded])
    earlier = [Frame((Lane(),) * len(COLORS), (), ()), *recorded]
    for words, first, stop in runs(map(happens, earlier, recorded)):
        with drawing.during(first, stop):
            drawing.text(18, 304, words, size=15, bold=True)
    return drawing


def happens(before: Frame, now: Frame) -> str:
    """The one event of a step that a reader should see."""
    lanes = dict(zip(COLORS, zip(before.lanes, now.lanes, strict=True), strict=True))
    for name, (old, new) in lanes.items():
        if new.state == "preempted" != old.state:
            return f"{name} is preempted: others get its pages"
    for page, owner in zip(before.pages, now.pages, strict=False):
        if page == "cached" and owner in COLORS:
            return f"{owner} gets a page that was cached: the pool is full"
    for name, (old, new) in lanes.items():
        if new.state == "done" != old.state:
            return f"{name} has ended: its full pages stay in the cache"
    chunks = [name for name, (old, new) in lanes.items() if old.computed < new.computed < new.prompt]
    if chunks:
        return f"{' and '.join(chunks)}: a chunk of the prompt, and others beside it"
    begun = [name for name, (old, new) in lanes.items() if old.computed < new.prompt <= new.computed]
    return (
        f"the prompt of {' and '.join(begun)} is complete: the first token" if begun else "each request decodes a token"
    )


def _lane(drawing: Film, name: str, y: float, states: list[Lane]) -> None:
    """A request: its tokens, those of the answer after a gap, filled as far as they are computed."""
    left, scale = 44, 5.8
    drawing.cell(18, y, 20, 20, name, COLORS[name], "on")
    for (state, computed, prompt, total), first, stop in runs(states):
        with drawing.during(first, stop):
            if not state:
                continue
            drawing.rect(left, y + 3, prompt * scale, 14, "faint")
            drawing.rect(left, y + 3, min(computed, prompt) * scale, 14, COLORS[name])
            if computed > prompt or total > prompt:
                drawing.rect(left + prompt * scale + 3, y + 3, (total - prompt) * scale, 14, COLORS[name])
            if state != "running":
                drawing.text(left + total * scale + 10, y + 15, state, "soft", 13)


def _step(drawing: Film, steps: list[tuple[str, ...]]) -> None:
    """The budget of a step, a box for each token."""
    for at in range(SETTING.budget):
        drawing.rect(18 + BAR * at, 226, BAR - 3, 22, "faint")
        for name, first, stop in runs([step[at] if at < len(step) else "" for step in steps]):
            if name:
                with drawing.during(first, stop):
                    drawing.cell(18 + BAR * at, 226, BAR - 3, 22, name, COLORS[name], "on", 13)
    for number, step in enumerate(steps):
        with drawing.during(number, number + 1):
            words = f"step {number + 1}: {len(step)} of at most {SETTING.budget} tokens"
            drawing.text(18, 274, words, "soft", 14)


def _pool(drawing: Film, pools: list[tuple[str, ...]]) -> None:
    """The pages, six in a row."""
    for page in range(SETTING.pages):
        x, y = 398 + (PAGE + 2) * (page % 6), 42 + (PAGE + 2) * (page // 6)
        drawing.rect(x, y, PAGE, PAGE, "faint")
        for look, first, stop in runs([pool[page] for pool in pools]):
            if look == "free":
                continue
            with drawing.during(first, stop):
                fill = {"shared": "ink", "cached": "line"}.get(look) or COLORS[look]
                drawing.cell(x, y, PAGE, PAGE, look if look in COLORS else "", fill, "on")
    for words, fill, left in (("shared", "ink", 0), ("cached", "line", 76), ("free", "faint", 156)):
        x = 398 + left
        drawing.rect(x, 200, 14, 14, fill)
        drawing.text(x + 20, 212, words, "soft", 14)
