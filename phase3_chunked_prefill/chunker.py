"""Chunker: plans a step. Splits its token budget between decodes and prompts. Integers only."""

from collections.abc import Callable, Iterable, Sequence

from phase0_request.batch import Batch
from phase0_request.queue import SequenceState
from phase0_request.request import Request
from phase0_request.support.checks import check_int
from phase3_chunked_prefill.budget import StepPlan, TokenBudget


class Chunker:
    """Splits every step between decodes and prompts.

    A request with one pending token is a decode. With more it is a prompt: new, half computed, or resumed after a
    preemption. A prompt is long while it needs more than one chunk (`max_chunk_size`), and otherwise short.

    - Decodes come first. While there are prompts, `budget.prompt_floor` tokens of the step are left to them.
    - If not all decodes fit, they rotate: of n with room for k, each runs once in ceil(n / k) steps.
    - Prompts get the rest in order, at most one chunk each. Long prompts leave the short ones as much as these can use,
      up to half: neither kind can block the other.

    So some decode, the first prompt and the first short prompt advance in every step, and no request starves. (If only
    one token is left for prompts, the first prompt gets it, long or short.)
    """

    def __init__(self, budget: TokenBudget, page_size: int = 1) -> None:
        self.budget = budget
        self.page_size = check_int("page_size", page_size, 1)
        self._skipped: list[Request] = []  # the decodes that did not run in the last step, longest waiting first

    # region exercise 3.4
    def schedule(
        self,
        running: Iterable[SequenceState],
        waiting: Iterable[int] = (),
        allocate_slots: Callable[[Sequence[SequenceState]], Sequence[SequenceState]] = list,
    ) -> StepPlan:
        """Plan a step for the running sequences, in their order.

        `waiting` has the pending tokens of requests that may be admitted to this step afterwards: the budget is split
        with them in mind. `allocate_slots` finds slots in memory for the next tokens of sequences, and returns the
        sequences that have them. It gets all sequences at once, since a slot for one may be taken from another.
        """
        decodes: list[SequenceState] = []
        prompts: list[SequenceState] = []
        for sequence in running:
            pending = sequence.num_tokens - sequence.num_scheduled
            if pending == 1:
                decodes.append(sequence)
            elif pending:
                prompts.append(sequence)
        pending_lengths = [prompt.num_tokens - prompt.num_scheduled for prompt in prompts] if prompts else []
        pending_lengths += waiting
        step = StepPlan.of_step(self.budget, self.page_size, len(decodes), pending_lengths)
        ready = allocate_slots([*self.rotate_decodes(decodes, step.decodes), *prompts])
        ready_decodes = [each for each in ready if each.num_tokens - each.num_scheduled == 1] if prompts else ready
        step.add_decodes(ready_decodes)
        for sequence in ready[len(ready_decodes) :]:
            step.add_prompt(sequence)
        return step

    # endregion

    def plan(self, running: Iterable[Request]) -> Batch:
        """Plan a step for a fixed set of requests that have nothing in flight."""
        return Batch(self.schedule([SequenceState(request) for request in running]).slices)

    # region exercise 3.3
    def rotate_decodes(self, decodes: Sequence[SequenceState], room: int) -> Sequence[SequenceState]:
        """Choose the `room` decodes that run, in their own order, so that all take turns. Called once per step."""
        if len(decodes) <= room:
            self._skipped = []
            return decodes
        place = {request: place for place, request in enumerate(self._skipped)}
        behind = len(place)
        queue = sorted(decodes, key=lambda decode: place.get(decode.request, behind))  # stable: the others in order
        self._skipped = [decode.request for decode in queue[room:]]
        skipped = set(self._skipped)
        return [decode for decode in decodes if decode.request not in skipped]

    # endregion
