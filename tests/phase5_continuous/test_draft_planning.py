"""How many drafts a step has room for, and which requests get them, by an engine of integers."""

from typing import Any

import pytest

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.speculation.speculation import Chance, Speculation, speculation_of
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import DraftRunner, Engine, Oracle, draft_model, request


def decoding(speculation: Speculation, *requests: Request, pages: int = 99, **more: Any) -> Engine:
    """Each request has a token of output."""
    engine = Engine(Scheduler(PagedCache(pages, 4), extender=speculation, **more))
    engine.submit(*requests)
    engine.step()
    return engine


def planned(spare_rows: int, *sizes: tuple[int, int], chance: float = 0.7, pages: int = 99, **more: Any) -> list[int]:
    """The lengths of the slices of the next step. `sizes`: prompt, max_tokens."""
    running = [request(f"{number}", *size) for number, size in enumerate(sizes)]
    speculation = Speculation(Oracle(), 4, spare_rows)
    engine = decoding(speculation, *running, pages=pages, **more)
    engine.check()
    for each in running:
        speculation._chances[each] = Chance(chance)
    return [part.length for part in engine.plan()]


def test_drafts_fill_the_spare_rows_of_a_step_and_no_more() -> None:
    one, many = (3, 50), [(3, 50)] * 40
    assert planned(100, one) == [5], "one request, 100 spare rows: a draft of four"
    assert planned(0, one) == [1], "no spare rows: no draft"
    assert planned(8, *many) == [1] * 40, "40 requests, 8 spare rows: this step is bound by arithmetic"
    assert 40 < sum(planned(200, *many)) < 200, "40 requests, 200 spare rows: some drafts, not all"
    assert planned(8, one, chance=0.1) == [1], "a request that rejects its drafts gets none"
    assert planned(8, one, one, chance=0.5) == [3, 2], (
        "at even odds two tokens pay for the first request, one more after"
    )


def test_a_draft_model_follows_its_requests() -> None:
    """Its runner checks what each token is drawn from. The pools and its context are too small for some requests, and
    while prompts arrive, the others go on without drafts."""
    for kind, pages, of_drafts in ((PagedCache, 400, 120), (PrefixCache, 140, 300)):
        speculation = Speculation(drafter := draft_model(kind(of_drafts, 4), context=500), 4, spare_rows=60)
        engine = Engine(Scheduler(kind(pages, 4), extender=speculation))
        engine.submit(*(request(f"{number}", 5 + number, 80) for number in range(8)))
        for number in range(3):
            for _ in range(9):
                engine.step()
            engine.submit(request(f"long {number}", 300, 230))
        engine.run().check_the_end()
        accepted = sum(speculation.accepted) / speculation.drafted
        assert 0.5 < accepted < 1, f"the draft model knows most tokens, and {accepted:.0%} of its drafts were right"
        assert isinstance(drafter.runner, DraftRunner)
        longest = drafter.runner.longest
        assert 450 < longest <= 500, f"its longest request has {longest} tokens, and its context is 500"
        drafter.draft({})
        assert drafter.cache.usage.referenced == 0, "a request that has ended has no pages"
        assert (drafter.cache.usage.cached > 0) == kind.shares


def test_when_a_draft_model_fails_its_requests_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = Speculation(drafter := draft_model(PagedCache(99, 4)), 4, spare_rows=60)
    launch, calls = drafter.runner.launch, list[Any]()

    def failing(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 7:
            raise RuntimeError("the device is out of memory")
        return launch(batch)

    monkeypatch.setattr(drafter.runner, "launch", failing)
    engine = decoding(speculation, request("a", 5, 200), request("b", 9, 180))
    engine.run().check_the_end()
    assert len(calls) == 7
    assert speculation.drafted > 0
    assert drafter.cache.usage.referenced == 0


@pytest.mark.parametrize(("cost", "drafted"), [(0.0, 2), (0.3, 1), (0.5, 0)])
def test_the_time_of_a_draft_model_counts(cost: float, drafted: int) -> None:
    """A step of one row takes the time of nine. At even odds a draft is worth half of that, less its own row."""
    speculation = Speculation(draft_model(PagedCache(99, 4), cost), 4, 8)
    engine = decoding(speculation, request("a", 3, 50))
    speculation.shared.value = 0.5
    lengths = [part.length for part in engine.plan()]
    assert lengths == [1 + drafted], f"a step of the draft model takes {cost} of the target's: {drafted} tokens pay"


def test_a_prompt_in_the_step_leaves_no_spare_rows() -> None:
    engine = decoding(Speculation(Oracle(), 4, 8), request("a", 3, 50))
    engine.submit(request("b", 200, 50))
    assert [part.length for part in engine.plan()] == [1, 200]


def test_no_page_is_taken_from_another_request_or_from_the_watermark_for_a_draft() -> None:
    """A prompt of three tokens and one of output fill a page of four; a pool of one more page has room for a draft."""
    assert planned(100, (3, 7), pages=2) == [5]
    assert planned(100, (3, 2), pages=2) == [1], "its output has one token more, which is never computed"
    assert planned(100, (2, 6), pages=2, watermark=0.5) == [2], "what is left of its page"
    assert planned(100, (3, 7), (3, 7), pages=3) == [5, 1]


def test_a_request_without_drafts_gets_them_once_its_proposals_are_right() -> None:
    """Three requests fill a step of three spare rows so far that one right proposal in two does not pay."""

    class Right(Oracle):
        def propose(self, request: Request, most: int) -> list[int]:
            return self.outputs[request.id][0][len(request.output_tokens) :][:most]

    speculation = Speculation(oracle := Right(), 4, 3)
    engine = Engine(Scheduler(PagedCache(400, 4), extender=speculation))
    requests = [request(name, 3, 100) for name in "abc"]
    engine.submit(*requests)
    oracle.outputs = engine.alone
    for _ in range(3):
        assert len(engine.step()) == 3
    assert speculation.drafts == 0
    engine.run().check_the_end()
    assert engine.steps < 60
    assert sum(speculation.accepted) == speculation.drafted > 100
    assert speculation.accepted[0] == speculation.drafts


def test_one_that_rejects_its_drafts_is_rarely_drafted_again() -> None:
    class Wrong:
        def propose(self, request: Request, most: int) -> list[int]:
            return [1_000_000] * most

    speculation = Speculation(Wrong(), 4, 8)
    engine = decoding(speculation, request("a", 3, 1000), pages=400)
    engine.run().check_the_end()
    assert speculation.accepted == [0] * 4
    assert speculation.drafts < 10, f"all its drafts are wrong, and {speculation.drafts} were computed for 1,000 tokens"


def test_a_right_draft_whose_row_did_not_count_has_gained_nothing() -> None:
    """A late mask, or a token that the grammar forces behind it."""
    speculation, chances = speculation_of({"method": "ngram"}), [Chance(), Chance()]
    assert speculation is not None
    for drafted, chance in zip((1, 0), chances, strict=True):
        made = request("a")
        speculation.proposals[made] = [5, 6], chance
        speculation.learn(made, drafted, [5])
    draft, proposal = (chance.value for chance in chances)
    assert draft < Chance().value, "5 was drafted and drawn, but its row gave no token: it counts as wrong"
    assert proposal > Chance().value, "5 was proposed without a draft, and drawn: it counts as right"
