"""Speculation: gives the decodes of a step drafts to verify, as many as pay.

A decode step waits for memory: while the weights are read, a few more rows are computed in the same time. Drafts fill
these rows. In a step of many requests, or with a prompt, arithmetic takes the time, and a row pays only if it is likely
to be accepted.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.queue import SequenceState
from phase0_request.request import Request
from phase0_request.support.checks import check_choice, check_int, invalid
from phase2_prefill_decode.extras.outcome import drawn_of, extras_of
from phase3_chunked_prefill.budget import StepPlan
from phase5_continuous.extras.speculation.draft_model import DraftModel
from phase5_continuous.extras.speculation.ngram import NgramProposer
from phase5_continuous.extras.speculation.suffix import SuffixProposer
from phase5_continuous.running import RunningSet

if TYPE_CHECKING:  # the server's process checks the options of speculation, and has no scheduler
    from phase5_continuous.scheduler import Scheduler

log = logging.getLogger(__name__)
PRIOR = 0.5  # the chance of a proposed token, before any was judged
LEARNED = 1 / 8  # what a judged token changes of that, at least
JUDGED = 4  # requests without a draft are judged in one step of so many: a proposal takes a few microseconds
JUDGED_OF_MODEL = 512  # the same for a draft model, whose proposals take a step
OF_MODEL = 0.8, 8, 1 / 64  # the chance that two models draw the same token is that of all requests, and high at first
METHODS = {"ngram": NgramProposer, "suffix": SuffixProposer}
DRAFT_MODEL = "draft_model"
BUSY = 0.75  # of the time of a step is arithmetic: it gets no drafts, for even right ones would gain little


class Proposer(Protocol):
    """Guesses what follows the tokens of a request. A wrong guess costs time, and never changes an output."""

    def propose(self, request: Request, most: int) -> Sequence[int]: ...


@dataclass(slots=True)
class Chance:
    """How likely the next token of a request's proposals is right. The first verdicts count more."""

    value: float = PRIOR
    judged: int = 0
    least: float = LEARNED

    # region exercise 11.5
    def learn(self, right: bool) -> None:
        self.judged += 1
        self.value += max(self.least, 1 / (2 + self.judged)) * (right - self.value)

    # endregion


@dataclass(slots=True)
class Speculation:
    """Plans the drafts of steps, and learns from what they accept.

    A step takes the time to read the weights, and a little more for each row: `spare_rows` rows take as long as the
    weights. So in units of a row, a step of R rows takes spare_rows + R. One more row, which is accepted with
    probability p, pays if p is more than what the step yields in that time: E / (spare_rows + R), where E is the number
    of its rows that are expected to count.

    A draft is the beginning of a proposal. The token after it is not computed but still judged, since the step draws
    the token in its place anyway. So a request without a draft is judged too, at no cost to the device: it gets a draft
    when its proposals have turned out right.

    A draft model's tokens take time themselves. It drafts for all requests of a step at once, so each token takes a
    share of its steps: this share and the token's own row are its `price`, in rows.
    """

    proposer: Proposer
    most: int = 7  # tokens of a draft
    spare_rows: int = 3
    drafts: int = 0
    drafted: int = 0  # tokens
    accepted: list[int] = field(init=False)  # tokens, by their place in the draft
    shared: Chance = field(default_factory=lambda: Chance(*OF_MODEL), init=False)  # of a draft model, for all requests
    unjudged: int = field(default=0, init=False)  # tokens for which it drafted nothing
    _chances: WeakKeyDictionary[Request, Chance] = field(default_factory=WeakKeyDictionary, init=False)
    proposals: dict[Request, tuple[Sequence[int], Chance]] = field(default_factory=dict, init=False)  # of a step
    _steps: int = field(default=0, init=False)
    _pays: bool = field(default=True, init=False)  # a draft for one of the last step's requests, or it had none

    def __post_init__(self) -> None:
        self.accepted = [0] * self.most

    @property
    def counts(self) -> tuple[int, int, tuple[int, ...]]:
        return self.drafts, self.drafted, tuple(self.accepted)

    def extend(self, step: StepPlan, running_set: RunningSet) -> list[Slice]:
        """The slices of a step, with decodes lengthened by drafts. Drafts take what the requests leave of the step's
        budget and of the pool; no request waits or is preempted for one."""
        slices, left, self.proposals = [*step.slices], step.left, {}
        rows = expected = float(sum(part.length for part in slices))
        if rows > BUSY * (self.spare_rows + rows):
            return slices
        self._steps += 1
        model = self.draft_model
        judges = model is not None or self._steps % JUDGED == 0
        looks = judges or self._pays if model is None else self._draft(model, step, rows)
        if not looks:
            return slices
        pays = list[bool]()
        for number, (sequence, part) in enumerate(zip(step.sequences, step.slices, strict=True)):
            if not may_draft(sequence, part):
                continue
            request, start, length, _ = part
            chance = self.shared if model is not None else self._chances.get(request)
            if chance is None:
                chance = self._chances[request] = Chance()
            most = self._worthwhile(chance.value, rows, expected)
            pays.append(most > 0)
            if not (most or judges):
                continue
            most = min(most, left, step.limits.max_chunk_size - length, sequence.longest - sequence.num_tokens)
            if not (proposal := self.proposer.propose(request, most + 1)):
                continue
            self.proposals[request] = proposal, chance
            most = min(most, len(proposal))
            if most and (most := allocate(running_set, sequence, most)):
                slices[number] = Slice(request, start, length + most, tuple(proposal[:most]))
                rows, left = rows + most, left - most
                expected += sum(chance.value ** (place + 1) for place in range(most))
        self._pays = any(pays) or not pays
        return slices

    @property
    def draft_model(self) -> DraftModel | None:
        return self.proposer if isinstance(self.proposer, DraftModel) else None

    def _draft(self, model: DraftModel, step: StepPlan, rows: float) -> bool:
        """Have the draft model draft as many tokens per decode as pay, or now and then one to judge. False if it
        drafts nothing."""
        decodes = [
            sequence
            for part, sequence in zip(step.slices, step.sequences, strict=True)
            if may_draft(sequence, part) and sequence.longest > sequence.num_tokens and step.left
        ]
        price = 1 + model.cost * (self.spare_rows + rows) / max(len(decodes), 1)
        most = self._worthwhile(self.shared.value, rows, rows, price)
        if not most:
            self.unjudged += len(decodes)
            decodes = decodes[:1] if self.unjudged >= JUDGED_OF_MODEL else []
        if decodes:
            self.unjudged = 0
            try:
                model.draft({each.request: min(max(most, 1), each.longest - each.request.total) for each in decodes})
            except Exception:
                log.exception("the draft model has failed, and is asked again in %d tokens", JUDGED_OF_MODEL)
                model.reset()
                self.shared.value = 0
        return bool(decodes)

    # region exercise 11.5
    def _worthwhile(self, chance: float, rows: float, expected: float, price: float = 1) -> int:
        """How many tokens of one draft pay in a step of this many rows, if each takes the time of `price` rows. A token
        is accepted only if those before it are."""
        most, accepted = 0, chance
        while most < self.most and accepted * (self.spare_rows + rows) > expected * price:
            most, rows, expected, accepted = most + 1, rows + price, expected + accepted, accepted * chance
        return most

    # endregion

    def committed(self, batch: Batch, output: StepOutput) -> None:
        """Judge the proposals of a step."""
        for number, part in enumerate(batch.slices) if self.proposals else ():
            drawn = drawn_of(output, number)
            if drawn and part.request in self.proposals and not part.request.finished:
                self.learn(part.request, len(part.beyond), drawn)

    def learn(self, request: Request, drafted: int, drawn: Sequence[int]) -> None:
        """Judge a proposal by the tokens that a step drew: one, and one more after each accepted token of the draft.
        Tokens after the first wrong one say nothing. A right token of the draft is judged wrong if nothing was drawn
        from its row, because the mask was late or the grammar forces what follows: it has gained nothing."""
        proposal, chance = self.proposals.pop(request)
        # region exercise 11.6
        for place, (token, right) in enumerate(zip(proposal, drawn, strict=False)):
            counts = place >= drafted or place + 1 < len(drawn)
            chance.learn(token == right and counts)
            if token != right:
                break
        # endregion
        if drafted:
            self.drafts += 1
            self.drafted += drafted
            accepted = len(drawn) - 1
            extras = extras_of(request)
            extras.accepted_drafts += accepted
            extras.rejected_drafts += drafted - accepted
            for place in range(accepted):
                self.accepted[place] += 1


def allocate(running_set: RunningSet, sequence: SequenceState, tokens: int) -> int:
    """Give a request slots for up to `tokens` more tokens, as far as the pool has room beside the watermark. Returns
    how many got one. The request's next tokens fill the slots that stay empty."""
    total = sequence.request.total
    if total + tokens > sequence.capacity:
        if running_set.cache.can_grow(sequence.request, total + tokens + running_set.watermark):
            running_set.grow(sequence, total + tokens)
        tokens = min(tokens, sequence.capacity - total)
    return tokens


def may_draft(sequence: SequenceState, part: Slice) -> bool:
    """Whether a slice draws a token, and is of output alone."""
    request, start, length, _ = part
    return start + length >= sequence.num_tokens and start >= len(request.prompt_tokens)


def speculation_in(scheduler: "Scheduler") -> Speculation | None:
    """The scheduler's extender, if that is speculation."""
    return scheduler.extender if isinstance(scheduler.extender, Speculation) else None


def speculation_of(config: Mapping[str, Any] | None, spare_rows: int = 3) -> Speculation | None:
    """Speculation as `--speculative-config` describes it; None without it. ValueError names what is wrong."""
    if config is None:
        return None
    given = dict(config)

    def number(key: str, default: int, low: int, high: int) -> int:
        return check_int(f"speculative_config: {key}", given.pop(key, default), low, high)

    proposer: Proposer
    method = check_choice("speculative_config: method", given.pop("method", None), (*METHODS, DRAFT_MODEL))
    most = number("num_speculative_tokens", 7, 1, 64)
    rows = number("spare_rows", spare_rows, 0, 1 << 20)
    if method == DRAFT_MODEL:
        known, model = "model", given.pop("model", None)
        if not isinstance(model, str) or not model:
            raise invalid("speculative_config: model", "a directory or the name of a repository", model)
        proposer = DraftModel(model)
    else:
        known = "prompt_lookup_max and prompt_lookup_min"
        longest = number("prompt_lookup_max", 4, 1, 64)
        proposer = METHODS[method](number("prompt_lookup_min", min(2, longest), 1, longest), longest)
    if given:
        keys = f"of the keys method, num_speculative_tokens, spare_rows and, for {method}, {known}"
        raise invalid("speculative_config", keys, ", ".join(given))
    return Speculation(proposer, most, rows)
