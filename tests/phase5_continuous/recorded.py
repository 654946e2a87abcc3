"""A record of an engine of `support`, replayed as it is written, and compared with the engine."""

import json

from phase0_request.core import CoreObserver, Step
from phase0_request.request import Request
from phase1_kv_pool.extras.windows import WindowedCache
from phase3_chunked_prefill.budget import StepPlan
from phase4_radix.extras.nodes import nodes_of, path_to
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.held import Held, held
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.extras.record.replay import Replay
from tests.phase5_continuous.support import Engine, preempted_of, share_of


class Recorded(CoreObserver):
    """The record of an engine from now on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.replay = Replay()
        self.whys: list[str] = []  # why requests were held
        self.accepted = 0  # tokens of drafts
        self.recorder = Recorder(engine.core, self.write, text=True)
        engine.core.observers.append(self)

    def close(self) -> None:
        self.recorder.close()
        self.engine.core.observers.remove(self)

    def write(self, line: Line) -> None:
        self.replay.apply(json.loads(json.dumps(line)))

    def check(self) -> None:
        """The state that was rebuilt from the record is that of the engine."""
        self.recorder.flush()
        engine, replay, cache = self.engine, self.replay, self.engine.scheduler.cache
        recorded = {each.id: each for each in replay.requests.values()}
        live = {sequence.request.id for sequence in engine.scheduler.sequences}
        for name, request in engine.requests.items():
            if name not in recorded and name not in live:  # it had ended when the record began
                continue
            if not request.finished:
                assert recorded[name].state == request.state.value
            elif name in engine.ended:
                assert (recorded[name].state, recorded[name].error) == (engine.ended[name].value, request.error)
            output = engine.delivered[name]
            assert recorded[name].output == len(output)
            assert recorded[name].tokens == [*request.prompt_tokens, *output]
        tables = {name: cache.table(engine.requests[name]) for name in live if cache.has_table(engine.requests[name])}
        assert {replay.requests[number].id: pages for number, pages in replay.tables.items()} == tables
        counts = replay.counts()
        assert [counts[page] for page in range(cache.usage.total)] == [
            cache.allocator.count(page) for page in range(cache.usage.total)
        ]
        if isinstance(cache, PrefixCache):
            views = {view.node: view for view in nodes_of(cache.tree)}
            for view in views.values():
                above = path_to(cache.tree, view.node)[-2:-1]
                parents = [views[above[0]].pages[-1] if above else None, *view.pages]
                for place, page in enumerate(view.pages):
                    size = cache.page_size
                    assert replay.tree[page] == parents[place]
                    assert replay.tokens[page] == view.tokens[place * size : (place + 1) * size]
            assert len(replay.tree) == cache.tree.num_pages

    def completed(self, step: Step) -> None:
        """The line that was just written has all slices of the step, by kind."""
        line = self.replay.line
        if {"prefill", "decode", "verify"} & line.keys():  # else it was launched before the record began
            prefills = [tuple(each) for each in line.get("prefill", ())]
            decodes = len(line.get("decode", ()))
            prefill_tokens, whole = sum(length for _, _, length in prefills), {number for number, _, _ in prefills}
            for number, drafted, _ in line.get("verify", ()):
                if number in whole:  # of the last tokens of a request that resumes
                    prefill_tokens += drafted
                else:
                    decodes += 1 + drafted
            assert (prefill_tokens, decodes) == (step.prefill_tokens, step.decode_tokens)
            starts = {(self.replay.requests[number].id, start) for number, start, _ in prefills}
            assert starts <= {(part.request.id, part.start) for part in step.batch}
            self.accepted += sum(accepted for _, _, accepted in line.get("verify", ()))

    def planned(self, step: Step) -> None:
        """Each reason why a request was not admitted is true: trying it fails."""
        scheduler, plan = self.engine.scheduler, step.batch
        assert isinstance(plan, StepPlan)
        reasons = held(scheduler, plan)
        assert bool(reasons) == bool(scheduler.turns)
        for each in reasons:
            self.whys.append(each.why)
            assert self.is_true(each, step), each

    def is_true(self, held: Held, step: Step) -> bool:
        scheduler, (request, why, more) = self.engine.scheduler, held
        running_set, cache, budget = scheduler.running_set, scheduler.cache, scheduler.budget
        match why, more:
            case "tokens", ():
                computed = step.batch.num_tokens - sum(len(part.beyond) for part in step.batch)
                leaving = [each for each in running_set.leaving if not each.request.finished]  # about to be preempted
                decodes = {each.request for each in (*running_set.running, *leaving)} | {*preempted_of(scheduler)}
                without_a_page = decodes - {part.request for part in step.batch}
                return computed <= budget.max_batched_tokens <= computed + len(without_a_page)
            case "places", ():
                return len(running_set.running) == scheduler.admission.max_running
            case "long", ():
                return request.total > budget.max_chunk_size
            case "pages" | "watermark", (needed, available):
                cache.attach(request)
                missing = (cache.lacking if isinstance(cache, WindowedCache) else cache._missing)(
                    request, request.total
                )
                fits = cache.can_grow(request, request.total)
                fits_beside = cache.can_grow(request, request.total + running_set.watermark)
                cache.release(request)
                assert needed == missing
                assert fits == (needed <= available)
                return not fits if why == "pages" else fits and not fits_beside
            case "prefix", (Request() as other,):
                page = cache.page_size
                assert cache.cached_tokens(request) < len(other.prompt_tokens)
                return other.prompt_tokens[:page] == request.prompt_tokens[:page]
            case "fairness", (tenant,):
                assert tenant != request.tenant
                served = share_of(scheduler).served
                return served[str(tenant)] <= served[request.tenant]
        return False
