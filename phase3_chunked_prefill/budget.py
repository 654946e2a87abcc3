"""TokenBudget limits the tokens of a step, and so its time. StepPlan is a step that is being planned."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from phase0_request.batch import Batch, Slice
from phase0_request.queue import SequenceState
from phase0_request.support.checks import check_int


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The limits of a step: `max_batched_tokens` in all, `max_chunk_size` for one request.

    A decode takes one token of the step, and a chunk takes as many as it is long. With both limits as large as the
    longest prompt, no prompt is ever cut.
    """

    max_chunk_size: int = 256
    max_batched_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_chunk_size", "max_batched_tokens"):
            check_int(name, getattr(self, name), 1)
        if self.max_batched_tokens < 2:
            raise ValueError("max_batched_tokens must be at least 2, a decode and a token of a prompt; got 1")
        if self.max_chunk_size > self.max_batched_tokens:
            raise ValueError(
                f"max_chunk_size must be at most max_batched_tokens ({self.max_batched_tokens}), "
                f"got {self.max_chunk_size}"
            )

    @property
    def prompt_floor(self) -> int:
        """The tokens that decodes leave to prompts while any are pending: an eighth of the step, and at least one."""
        return max(self.max_batched_tokens // 8, 1)


# region exercise 3.1
def cut(start: int, pending: int, room: int, page_size: int) -> int:
    """Return the length of a prompt's next chunk: at most `room` of the `pending` tokens from position `start` on.

    A chunk that does not reach the end of its prompt ends at a page boundary, so that its last page is full and can be
    shared. If no boundary is within reach, the chunk takes all the room.
    """
    length = min(pending, room)
    if length < pending:
        boundary = (start + length) // page_size * page_size
        if boundary > start:
            length = boundary - start
    return length


# endregion


@dataclass(slots=True, kw_only=True)
class StepPlan(Batch):
    """A batch that is being planned: its slices so far, and the tokens that are left for prompts.

    For each prompt in order, `fit` says how many tokens it may compute. A prompt is long while it needs more than one
    chunk, and otherwise short. Some tokens are reserved for short prompts, so that they need not wait for a long prompt
    before them.
    """

    limits: TokenBudget
    page_size: int
    decodes: int  # how many decodes fit into the step
    left: int  # tokens left for prompts
    reserved_for_short: int  # of those left; negative once short prompts have taken more
    slices: list[Slice] = field(default_factory=list)
    sequences: list[SequenceState] = field(default_factory=list)

    # region exercise 3.2
    @classmethod
    def of_step(cls, limits: TokenBudget, page_size: int, num_decodes: int, pending: Sequence[int]) -> "StepPlan":
        """Split a step between `num_decodes` decodes and prompts with these `pending` lengths.

        Decodes come first, and leave `prompt_floor` tokens if prompts are pending. Of the rest, short prompts reserve
        as much as they can use, up to half.
        """
        decodes = min(num_decodes, limits.max_batched_tokens - (limits.prompt_floor if pending else 0))
        left = limits.max_batched_tokens - decodes
        short = sum(length for length in pending if length <= limits.max_chunk_size)
        reserved = min(short, left // 2)
        return cls(limits=limits, page_size=page_size, decodes=decodes, left=left, reserved_for_short=reserved)

    def fit(self, start: int, pending: int) -> int:
        """Return how many of a prompt's `pending` tokens, from position `start` on, fit into this step; may be 0."""
        room = min(self.left, self.limits.max_chunk_size)
        if self.is_long(pending):
            room = min(room, self.left - self.reserved_for_short)
        return cut(start, pending, room, self.page_size)

    # endregion

    def add_decodes(self, sequences: Sequence[SequenceState]) -> None:
        """Schedule the next token of each sequence."""
        self.slices += [Slice(sequence.request, sequence.num_scheduled, 1) for sequence in sequences]
        self.sequences += sequences

    def add_prompt(self, sequence: SequenceState) -> None:
        """Schedule as many tokens of a prompt as fit; may be none."""
        pending = sequence.num_tokens - sequence.num_scheduled
        length = self.fit(sequence.num_scheduled, pending)
        if length:
            self.slices.append(Slice(sequence.request, sequence.num_scheduled, length))
            self.sequences.append(sequence)
            self.left -= length
            if not self.is_long(pending):
                self.reserved_for_short -= length

    def is_long(self, pending: int) -> bool:
        return pending > self.limits.max_chunk_size

    @property
    def fits_long(self) -> bool:
        """Whether a long prompt can have a token of this step."""
        return self.left > max(self.reserved_for_short, 0)
