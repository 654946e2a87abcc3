"""The same requests under four schedules, as lanes over time: what the real schedulers plan, on simulated time."""

from dataclasses import replace
from typing import NamedTuple

from chapters.drawings.svg import Drawing
from phase0_request.request import Request, RequestState
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import Arrival

LETTERS = "ABCDEF"
Lengths = tuple[tuple[float, int, int], ...]  # arrival in seconds, tokens of the prompt, tokens of the answer
LONG_PROMPT = ((0.0, 200, 22), (0.0, 300, 6), (0.0, 150, 13), (0.03, 3000, 8), (0.04, 200, 9), (0.06, 250, 10))
LONG_ANSWERS = ((0.0, 60, 22), (0.0, 50, 17), (0.0, 60, 24), (0.03, 70, 18), (0.04, 40, 12), (0.06, 50, 10))
CHUNKED = Setting(way="fcfs", page_size=4, max_running=4, chunk=512, budget=768, max_tokens=64, prefix_cache=False)
PANELS = {
    "Static: a batch lasts as long as its longest answer": (LONG_PROMPT, replace(CHUNKED, way="static")),
    "Continuous: the whole prompt of D stalls the other decodes": (LONG_PROMPT, replace(CHUNKED, way="whole")),
    "Chunked: the decodes go on while the prompt of D is computed": (LONG_PROMPT, CHUNKED),
    "Long answers, few pages: the last in rank is preempted": (LONG_ANSWERS, replace(CHUNKED, pages=68)),
}
LOOKS = {"waiting": "line", "prefill": "amber", "decode": "blue", "preempted": "red"}
LEFT, RIGHT, TOP, ROW, GAP = 40, 20, 52, 17, 44


class Cell(NamedTuple):
    """What one request did in one step."""

    request: int
    start: float  # seconds
    stop: float
    did: str


def cells(lengths: Lengths, setting: Setting) -> list[Cell]:
    """Serve the requests, and record every step."""
    arrivals = [Arrival(time, (number + 2,) * prompt, answer) for number, (time, prompt, answer) in enumerate(lengths)]
    simulation = Simulation(arrivals, setting)
    seen: dict[str, Request] = {}
    found = []
    while simulation.going:
        start = simulation.clock.now
        step = simulation.step()
        stop = simulation.clock.now
        if step is None or not step.batch:
            continue
        took_part = {}
        for request, at, *_ in step.batch:
            seen[request.id] = request
            took_part[request.id] = "prefill" if at < len(request.prompt_tokens) else "decode"
        for number, (arrival, *_) in enumerate(lengths):
            name = f"r{number}"
            done = name in seen and seen[name].finished and name not in took_part
            if arrival >= stop or done:
                continue
            lost = name in seen and seen[name].state is RequestState.PREEMPTED
            did = took_part.get(name) or ("preempted" if lost else "waiting")
            found.append(Cell(number, max(start, arrival), stop, did))
    return found


def lanes() -> Drawing:
    """One panel for each schedule, on one scale of time."""
    panels = {title: cells(*panel) for title, panel in PANELS.items()}
    end = max(cell.stop for found in panels.values() for cell in found)
    high = ROW * len(LETTERS) + GAP
    drawing = Drawing(TOP + high * len(panels), "Six requests under four schedules: a lane for each request, over time")
    x = LEFT
    for name, color in LOOKS.items():
        drawing.rect(x, 16, 15, 13, color)
        drawing.text(x + 21, 28, name, "soft", 14)
        x += 110
    drawing.text(drawing.width - RIGHT, 28, "time", "soft", 14, "end")
    drawing.arrow(drawing.width - 100, 23, drawing.width - 56, 23)
    scale = (drawing.width - LEFT - RIGHT) / end
    for panel, (title, found) in enumerate(panels.items()):
        top = TOP + panel * high
        drawing.text(14, top + 8, title, size=14.5, bold=True)
        for number, letter in enumerate(LETTERS):
            drawing.text(22, top + 18 + ROW * number + 13, letter, "soft", 14)
        for cell in found:
            width = (cell.stop - cell.start) * scale
            y = top + 18 + ROW * cell.request
            drawing.rect(LEFT + cell.start * scale, y, max(width - 0.8, 0.5), ROW - 3, LOOKS[cell.did], radius=0)
    return drawing
