"""`nanoserve trace`: a record as a Chrome trace, for ui.perfetto.dev, with a lane for each request that is there."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from phase0_request.support.flags import Parser
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.replay import Replay
from phase6_integration.cli.replay_command import checked

ENGINE, REQUESTS = 1, 2  # processes of the trace
HOST, DEVICE = 1, 2  # threads of the engine
Event = dict[str, Any]


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve trace FILE [-o trace.json]"
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a record, of nanoserve record or generate --record (needed)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("trace.json"), help="(%(default)s)")


def run(given: argparse.Namespace, parser: Parser) -> int:
    try:
        events = [*Trace().events(checked(given.file, parser.prog))]
        given.output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (LookupError, TypeError) as error:  # of requests that are not there
        print(f"{parser.prog}: {given.file}: its lines do not follow from each other: {error!r}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


@dataclass(slots=True)
class Lane:
    """A row of the trace, for a request from its arrival to its end."""

    number: int
    since: float  # when the request arrived
    state: str = "waiting"
    state_since: float = 0.0
    tokens: int = 0  # of output, in this state


@dataclass(slots=True)
class Trace:
    """Makes events of lines. All times are microseconds."""

    replay: Replay = field(default_factory=Replay)
    lanes: dict[int, Lane] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)  # numbers of lanes that had a request: a heap
    opened: int = 0
    run_ended: float = 0.0
    now: float = 0.0  # the end of the line that came last

    def events(self, lines: Iterator[Line]) -> Iterator[Event]:
        yield from (_name(ENGINE, 0, "engine"), _name(ENGINE, HOST, "host"), _name(ENGINE, DEVICE, "model"))
        yield _name(REQUESTS, 0, "requests")
        for line in lines:
            if line.get("snapshot"):
                for number in [*self.lanes]:
                    yield from self._close(number, "lost sight of")
            self.replay.apply(line)
            if "record" not in line:
                start = 1e6 * line["t"] if "t" in line else self.now
                yield from self._step(line, start)
                yield from self._requests(line, start)
                yield from self._counters()
        for number in [*self.lanes]:
            yield from self._close(number, "still here")

    def _step(self, line: Line, start: float) -> Iterator[Event]:
        """The parts of a step. While steps run ahead, the runs of two overlap: the later one is shown behind the
        other."""
        self.now = max(self.now, start)
        if "ms" not in line:
            return
        plan, pack, ran, commit = (1e3 * part for part in line["ms"])
        launched = start + plan + pack
        landed = launched + ran
        slices: Event = {kind: line[kind] for kind in ("prefill", "decode", "verify") if kind in line}
        yield _span(ENGINE, HOST, "plan", start, plan, {"step": line["step"]})
        yield _span(ENGINE, HOST, "pack", start + plan, pack, {"step": line["step"]})
        begun = min(max(launched, self.run_ended), landed)
        yield _span(ENGINE, DEVICE, f"step {line['step']}", begun, landed - begun, slices)
        yield _span(ENGINE, HOST, "commit", landed, commit, {"step": line["step"]})
        self.run_ended, self.now = landed, landed + commit

    def _requests(self, line: Line, start: float) -> Iterator[Event]:
        for new in line.get("new", ()):
            number = heappop(self.free) if self.free else self.opened + 1
            self.opened = max(self.opened, number)
            self.lanes[new["r"]] = Lane(number, start, state_since=start)
            yield _name(REQUESTS, number, f"lane {number}")
        for number, by in line.get("preempted", ()):
            yield from self._enter(number, "preempted", start)
            cause = "for a tenant's turn" if by is None else f"for {self.replay.requests[by].id}"
            yield {"ph": "i", "s": "t", "name": f"preempted {cause}", **_place(REQUESTS, self._lane(number), start)}
        for number, first, length in line.get("prefill", ()):
            if number not in self.lanes:  # it had ended when this step was in flight
                continue
            yield from self._enter(number, "prefill", start)
            yield _span(REQUESTS, self._lane(number), f"{length} tokens", start, self.now - start, {"start": first})
        for number in (*line.get("decode", ()), *(each[0] for each in line.get("verify", ()))):
            if number in self.lanes:
                yield from self._enter(number, "decode", start)
        for number in line.get("out", ()):
            self.lanes[number].tokens += 1
        for number, reason, *_ in line.get("done", ()):
            yield from self._close(number, reason)

    def _lane(self, number: int) -> int:
        return self.lanes[number].number

    def _enter(self, number: int, state: str, start: float) -> Iterator[Event]:
        """Begin a state of a request, and yield the one that ends with it."""
        lane = self.lanes[number]
        if lane.state != state:
            start = max(start, lane.state_since)
            yield self._state(lane, start)
            lane.state, lane.state_since, lane.tokens = state, start, 0

    def _state(self, lane: Lane, end: float) -> Event:
        return _span(
            REQUESTS, lane.number, lane.state, lane.state_since, end - lane.state_since, {"output tokens": lane.tokens}
        )

    def _close(self, number: int, reason: str) -> Iterator[Event]:
        lane = self.lanes.pop(number)
        request = self.replay.requests[number]
        sizes = {"prompt tokens": request.prompt, "output tokens": request.output, "end": reason}
        yield self._state(lane, self.now)
        yield _span(REQUESTS, lane.number, request.id, lane.since, self.now - lane.since, sizes)
        heappush(self.free, lane.number)

    def _counters(self) -> Iterator[Event]:
        replay = self.replay
        referenced = {page for table in replay.tables.values() for page in table}
        pages = {"referenced": len(referenced), "cached": len(replay.tree.keys() - referenced)}
        states = [replay.requests[number].state for number in self.lanes]
        running = states.count("running")
        for name, counts in (("pages", pages), ("requests", {"running": running, "waiting": len(states) - running})):
            yield {"ph": "C", "name": name, "args": counts, **_place(ENGINE, 0, self.now)}


def _place(process: int, thread: int, start: float) -> Event:
    return {"pid": process, "tid": thread, "ts": round(start, 3)}


def _span(process: int, thread: int, name: str, start: float, length: float, arguments: Event) -> Event:
    """From nanosecond to nanosecond: two spans that meet do not overlap when they are rounded."""
    length = round(start + length, 3) - round(start, 3)
    place = _place(process, thread, start)
    return {"ph": "X", "name": name, **place, "dur": round(max(length, 0), 3), "args": arguments}


def _name(process: int, thread: int, name: str) -> Event:
    kind = "thread_name" if thread else "process_name"
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
