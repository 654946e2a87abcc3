"""Speculation: gives the decodes of a step drafts to verify, as many as pay.

A decode step waits for memory: while the weights are read, a few more rows are computed in the same time. Drafts fill
these rows. In a step of many requests, or with a prompt, arithmetic takes the time, and a row pays only if it is likely
to be accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from phase0_request.batch import Slice
from phase0_request.checks import check_choice, check_int, invalid
from phase0_request.params import SamplingParams
from phase0_request.queue import SequenceState
from phase0_request.request import Request
from phase3_chunked_prefill.budget import StepPlan
from phase5_continuous.running import RunningSet
from phase5_continuous.speculation.ngram import NgramProposer

PRIOR = 0.7  # the share of draft tokens that a request is expected to accept, before it has accepted or rejected any
LEARNED = 1 / 8  # what a verified token changes of that
FORGOTTEN = 1 / 512  # what a step without a draft changes: one that has rejected all is tried again after some steps


class Proposer(Protocol):
    """Guesses what follows the tokens of a request. A wrong guess costs time, and never changes an output."""

    def propose(self, request: Request, most: int) -> Sequence[int]: ...


@dataclass(slots=True)
class Speculation:
    """Plans the drafts of steps, and learns from what they accept.

    A step takes the time to read the weights, and a little more for each row: `spare_rows` rows take as long as the
    weights. So in units of a row, a step of R rows takes spare_rows + R. One more row, which is accepted with
    probability p, pays if p is more than what the step yields in that time: E / (spare_rows + R), where E is the number
    of its rows that are expected to count.
    """

    proposer: Proposer
    most: int = 4  # tokens of a draft
    spare_rows: int = 4
    drafts: int = 0
    drafted: int = 0  # tokens
    accepted: list[int] = field(init=False)  # tokens, by their place in the draft
    _acceptance: WeakKeyDictionary[Request, float] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        self.accepted = [0] * self.most

    def add_drafts(self, step: StepPlan, running_set: RunningSet) -> list[Slice]:
        """The slices of a step, those of decodes longer by a draft. Drafts take what the requests have left of the
        step's budget and of the pool; no request waits or is preempted for one."""
        slices, left = list(step.slices), step.left
        rows = expected = float(sum(part.length for part in slices))
        for number, (request, start, length) in enumerate(step.slices):
            if not slices[number].is_decode or not may_draft(request.params):
                continue
            acceptance = self._acceptance.get(request, PRIOR)
            most = min(self._worthwhile(acceptance, rows, expected), left, step.limits.max_chunk_size - 1)
            request.draft[:] = draft = self._draft(step.sequences[number], most, running_set)
            if not draft:
                self._acceptance[request] = acceptance + FORGOTTEN * (PRIOR - acceptance)
            slices[number] = Slice(request, start, length + len(draft))
            rows, left = rows + len(draft), left - len(draft)
            expected += sum(acceptance ** (place + 1) for place in range(len(draft)))
        return slices

    # region exercise 5.9
    def _worthwhile(self, acceptance: float, rows: float, expected: float) -> int:
        """How many tokens of a draft pay in a step of so many rows. One is accepted only if those before it are."""
        most, chance = 0, acceptance
        while most < self.most and chance * (self.spare_rows + rows) > expected:
            most, rows, expected, chance = most + 1, rows + 1, expected + chance, chance * acceptance
        return most

    # endregion

    def _draft(self, sequence: SequenceState, most: int, running_set: RunningSet) -> Sequence[int]:
        """A draft of up to `most` tokens that have slots."""
        most = min(most, sequence.longest - sequence.request.total)  # the last token of an output is never computed
        draft = self.proposer.propose(sequence.request, most) if most > 0 else ()
        return draft[: running_set.allocate_draft(sequence, len(draft))] if draft else ()

    # region exercise 5.9
    def learn(self, request: Request, drafted: int, accepted: int) -> None:
        """Note what a step has made of a draft. The tokens behind the first rejected one say nothing."""
        self.drafts += 1
        self.drafted += drafted
        for place in range(accepted):
            self.accepted[place] += 1
        acceptance = self._acceptance.get(request, PRIOR)
        for place in range(min(accepted + 1, drafted)):
            acceptance += LEARNED * ((place < accepted) - acceptance)
        self._acceptance[request] = acceptance

    # endregion


def may_draft(params: SamplingParams) -> bool:
    """Whether drafts of a request can be verified: masks are made for the next token alone."""
    return params.grammar is None and params.allowed_token_ids is None and not params.bad_words


def speculation_of(config: Mapping[str, Any] | None, spare_rows: int = 4) -> Speculation | None:
    """Speculation as `--speculative-config` describes it; None: without. ValueError names what is wrong with it."""
    if config is None:
        return None
    given = dict(config)

    def number(key: str, default: int, low: int, high: int) -> int:
        return check_int(f"speculative_config: {key}", given.pop(key, default), low, high)

    check_choice("speculative_config: method", given.pop("method", None), ("ngram",))
    most = number("num_speculative_tokens", 4, 1, 64)
    longest = number("prompt_lookup_max", 4, 1, 64)
    shortest = number("prompt_lookup_min", min(2, longest), 1, longest)
    rows = number("spare_rows", spare_rows, 0, 1 << 20)
    if given:
        known = "method, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min and spare_rows"
        raise invalid("speculative_config", f"of the keys {known}", ", ".join(given))
    return Speculation(NgramProposer(shortest, longest), most, rows)
