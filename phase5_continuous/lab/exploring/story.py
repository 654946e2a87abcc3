"""Stories: the events that lead to a state, in one piece: in words, and as a record that `nanoserve replay` opens."""

import marshal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from phase0_request.batch import Event, Slice
from phase0_request.core import Step
from phase5_continuous.extras.invariants import check
from phase5_continuous.extras.record.record_file import recording
from phase5_continuous.lab.exploring.promises import BrokenError, follow
from phase5_continuous.lab.exploring.setting import Setting
from phase5_continuous.lab.exploring.world import EOS, Happening, World, clock

ENDS = {
    "abort": "the client of {} disconnects",
    "timeout": "the deadline of {} passes",
    "stop": "the text of {} has a stop string",
}
WORDS = {
    "plan": "a step is planned",
    "commit": "a step is committed",
    "lose": "the steps in flight are lost",
    "again": "the steps in flight fail, and are to be planned again",
    "reset": "the cache is emptied",
}
TICK = 0.01  # seconds between two events of a record


def tell(setting: Setting, events: Sequence[Happening], file: Path | None = None) -> Iterator[str]:
    """Run a story in one piece, and record it if a file is given. Yields a sentence for each event, and at last what is
    broken then, as far as that shows in its last event. Requests are named in the order in which they arrive."""
    world = World(setting)
    world.numbers = count()
    with recording(world.core, file, text, "a small world") if file is not None else nullcontext():
        for event in events:
            world.now += TICK
            before, names = marshal.loads(world.encode()), [each.request.id for each in world.ordered()]
            wrong = None
            with clock():
                try:
                    step = world.happen(event)
                except Exception as error:
                    wrong = error
            if wrong is not None:
                yield _words(world, event)
                yield f"{type(wrong).__name__}: {wrong}"
                return
            yield _words(world, event) + _came_of(world, event, step)
    try:
        with clock():  # canonical: only so are pages and counts of tenants the ones that are compared
            follow(_named(setting, before, names, world.arrived), before, event, set())
        check(world.scheduler)  # in one piece: what no canonical state has
    except BrokenError as broken:
        yield broken.how
    except Exception as error:
        yield str(error)


def _named(setting: Setting, state: Any, names: Sequence[str], arrives: str) -> World:
    """A world in this state, whose requests have the names of a story, in the order of rank."""
    world = World(setting)
    world.decode(state)
    for request in world.kind_of:
        request.id = arrives
    for sequence, name in zip(world.ordered(), names, strict=True):
        sequence.request.id = name
    world.decode(state)
    return world


def text(token: int) -> str:
    return chr(token) if token != EOS else "<EOS>"


def _words(world: World, event: Happening) -> str:
    if event.what == "submit":
        kind = world.kinds[event.of]
        more = [f"of tenant {kind.tenant}"] * bool(kind.tenant) + [f"with salt {kind.salt}"] * bool(kind.salt)
        more += [f"with priority {kind.priority}"] * bool(kind.priority)
        return " ".join([f"{world.arrived} arrives with the prompt {kind.prompt}", *more])
    if event.what == "end":
        return ENDS[event.how].format(world.live[event.of].request.id)
    if event.what == "mask":
        return f"the mask of {world.live[event.of].request.id} is there"
    return WORDS[event.what]


def _came_of(world: World, event: Happening, step: Step | None) -> str:
    if event.what == "submit" and all(each.request.id != world.arrived for each in world.ordered()):
        return ", and the queue is full"
    if event.what == "plan":
        planned = ", ".join(map(_part, step.batch.slices)) if step is not None else "no request can take part"
        waits = [each.request.id for each in world.scheduler.turns]
        return f": {planned}" + (f"; {' and '.join(waits)} wait{'s' * (len(waits) == 1)}" if waits else "")
    if event.what == "commit" and step is not None:
        return f": {', '.join(map(_news, step.events)) or 'no token yet'}"
    return ""


def _part(part: Slice) -> str:
    request, start, length, beyond = part
    if length - len(beyond) == 1 and start >= len(request.prompt_tokens):
        return f"{request.id} decodes" + (f" with a draft of {len(beyond)}" if beyond else "")
    return f"{request.id} computes tokens {start} to {start + length}"


def _news(event: Event) -> str:
    got = f"{event.request.id} gets {text(event.token)}" if event.token is not None else event.request.id
    ends = f"ends ({event.finish_reason.value})" if event.finish_reason is not None else ""
    return f"{got} and {ends}" if event.token is not None and ends else f"{got} {ends}".strip()
