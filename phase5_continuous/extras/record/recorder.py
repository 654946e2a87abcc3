"""Recorder: what an engine did, a line a step: arrivals, admissions, pages, slices, tokens, and why the next one waits.

It observes the loop and the cache, and changes nothing. An engine without one pays nothing for it. A line is a dict of
short keys, to be written as JSON; `Replay` rebuilds the state of the engine from the lines.

    {"step": 17, "t": 0.31, "ms": [0.1, 0.2, 2.0, 0.1], "new": [{"r": 4, "id": "c", "prompt": 40, "max": 16}],
     "admitted": [[4, 32]], "pages": [["attach", 4, [7, 8]], ["grow", 4, [21]]], "prefill": [[4, 32, 8]],
     "decode": [0, 2], "out": [0, 2, 4], "held": [[5, "pages", 3, 1]]}

The header of a model with experts says how many a layer has, `"experts": 64`. Each step then says of a layer, on
average, how many experts it read, and how many rows the one with the most computed, and all: `[52.5, 7.2, 64.0]`.

The state of pages and requests after a line is that at the moment when it was written: once a step is committed. With
steps that run ahead, the next one has been planned by then: what its plan changed is in this line, its slices are in
the next.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from phase0_request.batch import Batch, Event
from phase0_request.core import CoreObserver, EngineCore, Step
from phase0_request.request import Request, RequestState
from phase1_kv_pool.cache import CacheObserver
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import StepPlan
from phase4_radix.extras.nodes import nodes_of
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.held import held
from phase5_continuous.extras.record.lines import VERSION, Line
from phase5_continuous.policies import POLICIES
from phase5_continuous.scheduler import Scheduler

if TYPE_CHECKING:  # a record of an engine without a model needs no torch
    from phase2_prefill_decode.extras.families.expert_counts import ExpertCounts


class PlannedDraft(NamedTuple):
    """A decode with a draft: how much of it the step accepts is known when it is committed."""

    request: Request
    drafted: int
    accepted_before: int


class Recorder(CoreObserver, CacheObserver):
    """Writes the lines of an engine from now on, the header first. If it has done something already, a snapshot
    follows: a line that leads from nothing to the present. With `text`, the ids of all tokens are written."""

    def __init__(
        self, core: EngineCore[Any, Any], write: Callable[[Line], object], *, text: bool = False, model: str = ""
    ) -> None:
        self.core = core
        self.scheduler: StaticScheduler | Scheduler = core.scheduler
        self.cache = self.scheduler.cache
        self.write = write
        self.text = text
        self.began = core.clock()
        self.experts = expert_counts(core)
        self._numbers: dict[Request, int] = {}  # of the requests that are here
        self._count = 0
        self._ended: list[Request] = []  # they may hold pages until a step in flight is committed
        self.tables: set[Request] = set()  # with a page table in the record
        self._changes: Line = {}  # since the last line
        write(self._header(model))
        if core.steps or core.has_work or self.cache.usage.free < self.cache.usage.total:
            self.snapshot()
        core.observers.append(self)
        self.cache.observers.append(self)

    def close(self) -> None:
        """Write the last changes, and stop observing."""
        self.flush()
        self.core.observers.remove(self)
        self.cache.observers.remove(self)

    def snapshot(self) -> None:
        """Write a line that leads from nothing to the present."""
        self.flush()
        live = [sequence.request for sequence in self.scheduler.sequences]
        ended = [r for r in live if r.finished and (r in self._ended or r not in self._numbers)]  # as far as is known
        self._ended.clear()
        for request in live:
            self._number(request)
        self._changes.clear()
        self.tables = {request for request in live if self.cache.has_table(request)}
        for stored in tree_pages(self.cache, self.text):
            self._note("pages", stored)
        for request, number in self._numbers.items():  # also of those whose end is yet to be written
            self._note("new", self._arrival(request))
            if request in self.tables:
                self._note("pages", ["attach", number, [*self.cache.table(request)]])
                self._note("admitted", [number, request.computed])
            elif request.state is RequestState.PREEMPTED:
                self._note("preempted", [number, None])
        line: Line = {"snapshot": True, "step": self.core.steps, "t": self._since(self.core.clock())}
        self._emit(line, [Event(request, None, request.finish_reason) for request in ended])

    def flush(self) -> None:
        """Write what has changed since the last step, if anything."""
        self._emit({}, ())

    # The loop calls these,

    def submitted(self, request: Request) -> None:
        self._number(request)

    def planned(self, step: Step) -> None:
        prefill: list[list[int]] = []
        decode: list[int] = []
        verify: list[PlannedDraft] = []
        numbers = self._numbers
        for request, start, length, beyond in step.batch.slices:
            drafted = len(beyond)
            if drafted:
                verify.append(PlannedDraft(request, drafted, extras_of(request).accepted_drafts))
            if start < len(request.prompt_tokens) or start + 1 < request.total:
                prefill.append([numbers[request], start, length - drafted])
            elif not drafted:
                decode.append(numbers[request])
        if self.experts is not None:
            self.experts.planned(step)
        planned = {"prefill": prefill, "decode": decode, "held": self._held(step.batch)}
        step.notes += ((self, (planned, verify)),)  # the kinds of its slices do not hold after its commit

    def completed(self, step: Step) -> None:
        line: Line = {}
        if step.batch.slices:
            parts = step.plan, step.pack, step.run, step.commit
            line = {
                "step": self.core.steps,
                "t": self._since(step.start),
                "ms": [int(1e6 * part) / 1e3 for part in parts],
            }
            for planned, verify in (note for of, note in step.notes if of is self):  # else it is older than the record
                for key, slices in planned.items():
                    if slices:
                        line[key] = slices
                if verify:
                    line["verify"] = [
                        [self._numbers[request], drafted, extras_of(request).accepted_drafts - before]
                        for request, drafted, before in verify
                    ]
            if self.experts is not None and (counts := self.experts.of(step)) is not None:
                line["experts"] = counts
        self._emit(line, step.events)

    def discarded(self) -> None:
        if self.experts is not None:
            self.experts.discarded()

    # and the cache these.

    def grown(self, request: Request, pages: Sequence[int]) -> None:
        number = self._number(request)
        if request not in self.tables:
            cached = self.cache.table(request)[: -len(pages)]
            self.tables.add(request)
            self._note("pages", ["attach", number, cached])
            self._note("admitted", [number, len(cached) * self.cache.page_size])
        self._note("pages", ["grow", number, [*pages]])

    def swapped(self, request: Request, first: int, pages: Sequence[int]) -> None:
        self._note("pages", ["swap", self._numbers[request], first, [*pages]])

    def released(self, request: Request) -> None:
        if request not in self.tables:  # it was attached, did not fit, and is released again
            return
        self.tables.remove(request)
        self._note("pages", ["free", self._numbers[request]])
        if request.state is RequestState.RUNNING:
            scheduler = self.scheduler
            by = scheduler.running_set.preempted_for if isinstance(scheduler, Scheduler) else None
            self._note("preempted", [self._numbers[request], None if by is None else self._numbers.get(by)])

    def stored(self, parent: int | None, pages: Sequence[int], tokens: Sequence[int], salt: str) -> None:
        self._note("pages", ["store", parent, [*pages], *([[*tokens]] if self.text else ())])

    def removed(self, pages: Sequence[int]) -> None:
        self._note("pages", ["evict", [*pages]])

    # A line.

    def _note(self, key: str, change: object) -> None:
        self._changes.setdefault(key, []).append(change)

    def _emit(self, line: Line, events: Sequence[Event]) -> None:
        """Write a line with what has changed and what came out of it, unless that is nothing."""
        numbers, out = self._numbers, []
        for request, token, reason, _ in events:
            if reason is not None and request not in self._ended:  # else a snapshot has said it
                error = () if request.error is None or not self.text else (request.error,)  # it may quote a grammar
                self._note("done", [self._number(request), reason.value, *error])
                self._ended.append(request)
            if token is not None:
                out.append(numbers[request])
        if out:
            line["out"] = out
            if self.text:
                line["ids"] = [event.token for event in events if event.token is not None]
        if self._changes:
            line |= self._changes
            self._changes = {}
        if self._ended:
            for request in self._ended:
                if request not in self.tables:
                    numbers.pop(request, None)
            self._ended = [request for request in self._ended if request in self.tables]
        if line:
            if "t" not in line:
                line["t"] = self._since(self.core.clock())
            self.write(line)

    def _number(self, request: Request) -> int:
        """The number of a request in this record: a new one at its first appearance."""
        if request not in self._numbers:
            self._numbers[request] = self._count
            self._count += 1
            self._note("new", self._arrival(request))
        return self._numbers[request]

    def _arrival(self, request: Request) -> Line:
        given: Line = {
            "r": self._numbers[request], "id": request.id, "prompt": len(request.prompt_tokens),
            "max": request.params.max_tokens, "priority": request.priority, "tenant": request.tenant,
            "salted": request.cache_salt != "", "output": len(request.output_tokens),
        }  # fmt: skip
        if self.text:
            given["tokens"] = request.tokens(0, request.total)
        return {key: value for key, value in given.items() if value or key in ("r", "id")}

    def _held(self, batch: Batch) -> list[list[Any]]:
        scheduler, numbers = self.scheduler, self._numbers
        reasons = held(scheduler, batch) if isinstance(scheduler, Scheduler) and isinstance(batch, StepPlan) else ()
        return [[numbers[request], why, *map(self._name, more)] for request, why, more in reasons]

    def _name(self, more: int | str | Request) -> int | str:
        return self._numbers[more] if isinstance(more, Request) else more

    def _header(self, model: str) -> Line:
        cache, scheduler = self.cache, self.scheduler
        line: Line = {
            "record": VERSION, "model": model, "text": self.text, "started": round(time.time(), 3),
            "page_size": cache.page_size, "num_pages": cache.allocator.num_pages, "shares": cache.shares,
        }  # fmt: skip
        if self.experts is not None:
            line["experts"] = self.experts.number
        if isinstance(scheduler, StaticScheduler):
            line["max_running"] = scheduler.batch_size
        if isinstance(scheduler, Scheduler):
            policies = {kind: name for name, kind in POLICIES.items()}
            budget, admission = scheduler.budget, scheduler.admission
            line |= {
                "max_running": admission.max_running, "budget": budget.max_batched_tokens,
                "chunk": budget.max_chunk_size, "policy": policies.get(type(admission.policy), ""),
                "watermark": scheduler.running_set.watermark // cache.page_size,
            }  # fmt: skip
        return line

    def _since(self, now: float) -> float:
        return int(1e6 * (now - self.began)) / 1e6


def expert_counts(core: EngineCore[Any, Any]) -> "ExpertCounts | None":
    """The counts of an engine's model; None if it has no experts."""
    runner = getattr(core.runner, "runner", core.runner)  # an isolating one has another inside
    layers = getattr(getattr(runner, "decoder", None), "layers", ())
    ends = [layer.mlp.ends for layer in layers if hasattr(layer.mlp, "ends")]
    if not ends:
        return None
    from phase2_prefill_decode.extras.families.expert_counts import ExpertCounts

    return ExpertCounts(ends)


def tree_pages(cache: Any, text: bool) -> Sequence[list[Any]]:
    """The operations that store what the tree of a cache holds."""
    stored, ends = list[list[Any]](), dict[int, int]()  # the last page of the newest node of each depth
    for view in nodes_of(cache.tree) if isinstance(cache, PrefixCache) else ():
        stored.append(["store", ends.get(view.depth - 1), view.pages, *([view.tokens] if text else ())])
        ends[view.depth] = view.pages[-1]
    return stored
