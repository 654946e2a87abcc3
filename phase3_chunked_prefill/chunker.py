"""Chunker: plans a step. Splits its token budget between decodes and prompts. Integers only."""

from collections.abc import Callable, Iterable, Sequence

from phase0_request.batch import Batch
from phase0_request.queue import SequenceState
from phase0_request.request import Request
from phase0_request.support.checks import check_int
from phase3_chunked_prefill.budget import StepPlan, TokenBudget


class Chunker:
    """Splits every step between decodes and prompts.

    A request with one pending token is a decode. With more it is a prompt: a new one, one that is half computed, or one
    that resumes after a preemption. A prompt is long while it needs more than one chunk (`max_chunk_size`), else short.

    - Decodes come first. While there are prompts, `budget.prompt_floor` tokens of the step are left to them.
    - If not all decodes fit, they rotate: of n with room for k, each runs once in ceil(n / k) steps.
    - Prompts get the rest in order, each at most a chunk. Long ones leave to short ones what these can use, up to half:
      a long prompt does not block the short ones behind it, and they cannot take its half.

    So some decode, the first prompt and the first short prompt advance in every step, and no request starves. (A single
    token that is left for prompts goes to the first of them, long or short.)
    """

    def __init__(self, budget: TokenBudget, page_size: int = 1) -> None:
        self.budget = budget
        self.page_size = check_int("page_size", page_size, 1)
        self._skipped: list[Request] = []  # the decodes that did not run in the last step, longest waiting first

    # region exercise 3.3
    def schedule(
        self,
        running: Iterable[SequenceState],
        waiting: Iterable[int] = (),
        allocate_slots: Callable[[Sequence[SequenceState]], Sequence[SequenceState]] = list,
    ) -> StepPlan:
        """Plan a step for the running sequences, in their order.

        `waiting` are the pending tokens of requests that may be admitted to this step after it: the budget is split
        with them in mind. `allocate_slots` makes sure that the next tokens of sequences have slots in memory, and
        returns those of which that is true.
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

    def plan(self, running: Iterable[Request]) -> Batch:
        """Plan a step for a fixed set of requests that have nothing in flight."""
        return Batch(self.schedule([SequenceState(request) for request in running]).slices)

    def rotate_decodes(self, decodes: Sequence[SequenceState], room: int) -> Sequence[SequenceState]:
        """Choose the decodes that run if `room` of them fit, in their own order. Called once a step."""
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
