"""The graph of states of the smallest world: two requests, three pages. Each is a dot, each event a line."""

import marshal
from typing import NamedTuple

from chapters.drawings.svg import Drawing
from phase5_continuous.lab.exploring.search import Expander
from phase5_continuous.lab.exploring.world import World
from phase5_continuous.lab.exploring.worlds import WORLDS

LOOKS = {"a step is in flight": "blue", "requests wait or run": "amber", "no request is here": "green"}
HIGH, LEFT, TOP, BOTTOM = 420, 34, 56, 46


class State(NamedTuple):
    """A state: how many events lead to it at least, what is in it, and the states that follow."""

    depth: int
    look: str
    next: list[bytes]


def graph() -> dict[bytes, State]:
    """Every state, in the order in which the search finds them."""
    setting = WORLDS["smallest"]
    world, found = World(setting), dict[bytes, State]()
    start = world.encode()
    depths, todo = {start: 0}, [start]
    for state in todo:
        expander = Expander(setting, None)  # a new one sends each state again
        edges, _, broken = expander.expand(state)
        assert broken is None
        after = [each for _, _, each in edges if each is not None and each != state]
        for each in after:
            if each not in depths:
                depths[each] = depths[state] + 1
                todo.append(each)
        world.decode(marshal.loads(state))
        looks = [*LOOKS]
        look = looks[0] if world.core._in_flight else looks[1] if world.ordered() else looks[2]
        found[state] = State(depths[state], look, after)
    return found


def states() -> Drawing:
    """One column for each number of events."""
    found = graph()
    columns = [
        [s for s, each in found.items() if each.depth == d] for d in range(max(f.depth for f in found.values()) + 1)
    ]
    edges = sum(len(each.next) for each in found.values())
    label = (
        f"The {len(found)} states of an engine with two requests and three pages, and the {edges} events between them"
    )
    drawing, places = Drawing(HIGH, label), dict[bytes, tuple[float, float]]()
    for depth, column in enumerate(columns):
        before = {each: [places[s][1] for s in places if each in found[s].next] for each in column}
        column.sort(key=lambda each: sum(before[each]) / max(len(before[each]), 1))
        for place, state in enumerate(column):
            x = LEFT + depth * (drawing.width - 2 * LEFT) / (len(columns) - 1)
            places[state] = x, TOP + (place + 0.5) * (HIGH - TOP - BOTTOM) / len(column)
    for state, each in found.items():
        x, y = places[state]
        for other in each.next:
            at, to = places[other]
            bend = f"Q{x + 26:g} {(y + to) / 2:.0f} " if at == x else "L"  # both are as far from the beginning
            drawing.path(f"M{x:.0f} {y:.0f} {bend}{at:.0f} {to:.0f}", "line", width=0.7)
    for state, each in found.items():
        x, y = places[state]
        drawing.rect(x - 5, y - 5, 10, 10, LOOKS[each.look], radius=5)
    x = 14.0
    for words, color in LOOKS.items():
        drawing.rect(x, 16, 12, 12, color, radius=6)
        drawing.text(x + 18, 27, words, "soft", 14)
        x += 190
    drawing.text(14, HIGH - 16, "0 events", "soft", 14)
    drawing.text(drawing.width - 14, HIGH - 16, f"{len(columns) - 1} events", "soft", 14, "end")
    return drawing
