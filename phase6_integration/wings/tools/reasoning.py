"""Reasoning parser: `<think>...</think>` before an answer, as Qwen3 and DeepSeek-R1 write it."""

from collections.abc import Sequence
from enum import Enum, auto

from phase0_request.tokenizer import Tokenizer
from phase6_integration.wings.tools.incremental import ContentDelta, IncrementalParser, ReasoningDelta, Wait

BEGIN, END = "<think>", "</think>"

TAIL = 16  # tokens of a prompt that a template ends with a tag in


class Thinking(Enum):
    """What an answer may begin with."""

    MAYBE = auto()  # with reasoning, if the model chooses
    BEGUN = auto()  # in the middle of it: the prompt has begun it
    OVER = auto()  # with content


def thinks(template: str, name: str | None) -> bool:
    """Whether answers have reasoning: by the name of a parser, else if the chat template knows of it."""
    return END in template if name is None else name != "none"


def thinking_after(prompt: Sequence[int], tokenizer: Tokenizer) -> Thinking:
    """What the template has written at the end of a prompt: some begin the reasoning, or end it if it is not wanted."""
    tail = b"".join(tokenizer.token_bytes(token, skip_special_tokens=False) for token in prompt[-TAIL:]).rstrip()
    if tail.endswith(BEGIN.encode()):
        return Thinking.BEGUN
    return Thinking.OVER if tail.endswith(END.encode()) else Thinking.MAYBE


class ThinkParser(IncrementalParser):
    """The reasoning comes first, or not at all. `begun`: the prompt ends with its beginning."""

    markers = (BEGIN, END)

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self._begun = begun

    def _answer(self) -> Wait[None]:
        if not self._begun:
            yield from self._space()
        if self._begun or (yield from self._optional(BEGIN)):
            yield from self._space()
            self._skip()
            yield from self._until(END, ReasoningDelta)
            yield from self._space()
            self._skip()
        self._streams = ContentDelta
        self._at = len(self._text)
        while not self._last:
            yield
            self._at = len(self._text)
