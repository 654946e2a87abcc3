"""TokenBudget: how many tokens a step may compute. What a step costs, and so how long everyone waits for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """A decode costs a step one token of `max_batched_tokens`, a chunk of a prompt as many as it has.

    A request computes at most `max_chunk_size` tokens in a step. With the two equal and as long as the longest prompt,
    nothing is ever cut.
    """

    max_chunk_size: int = 256
    max_batched_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("max_chunk_size", "max_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer from 1, got {value!r}")
        if self.max_batched_tokens < 2:
            raise ValueError("max_batched_tokens must be at least 2, a decode and a token of a prompt; got 1")
        if self.max_chunk_size > self.max_batched_tokens:
            raise ValueError(
                f"max_chunk_size must be at most max_batched_tokens ({self.max_batched_tokens}), "
                f"got {self.max_chunk_size}"
            )

    @property
    def prompt_floor(self) -> int:
        """The tokens of a step that decodes leave to prompts while there are any: an eighth, and at least one."""
        return max(self.max_batched_tokens // 8, 1)
