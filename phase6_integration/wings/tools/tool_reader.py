"""ToolReader: splits one choice of a chat into reasoning, content and tool calls while it is generated."""

import secrets
import string
from sys import getsizeof
from typing import Any

from phase6_integration.wings.tools.incremental import (
    AnswerDelta,
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from phase6_integration.wings.tools.reasoning import ThinkParser
from phase6_integration.wings.tools.tool_parsers import ToolParser

_ALPHABET = string.ascii_letters + string.digits


class ToolReader:
    """Takes the text of an answer. `parallel`: false drops all calls but the first. `must_call`: there is no content;
    the beginning of a call that was cut off is dropped. `id_length`: of the id of a call, if the template checks it."""

    def __init__(
        self,
        reasoning: ThinkParser | None = None,
        tools: ToolParser | None = None,
        *,
        parallel: bool = True,
        must_call: bool = False,
        include_reasoning: bool = True,
        id_length: int | None = None,
    ) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._parallel, self._include_reasoning, self._id_length = parallel, include_reasoning, id_length
        self._must_call = must_call
        self._new_reasoning = ""
        self._new_calls: list[dict[str, Any]] = []
        self.calls = 0  # so far

    def push(self, text: str, last: bool) -> str:
        """Add text. Returns the new content; what else is new stays here until `take`."""
        if self._reasoning is not None:
            text = self._sort(self._reasoning.push(text, last))
        if self._tools is not None:
            text = self._sort(self._tools.push(text, last))
        return "" if self._must_call else text

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._new_reasoning or self._new_calls)

    @property
    def text_bytes(self) -> int:
        return getsizeof(self._new_reasoning) + sum(
            getsizeof(call["function"]["arguments"]) for call in self._new_calls
        )

    def take(self) -> dict[str, Any]:
        """The fields of a delta beside the content. A call has its id and name where it begins."""
        fields = {"reasoning_content": self._new_reasoning, "tool_calls": self._new_calls}
        self._new_reasoning, self._new_calls = "", []
        return {name: value for name, value in fields.items() if value}

    def _sort(self, events: list[AnswerDelta]) -> str:
        """Keep the new reasoning and calls, and return the content."""
        content = ""
        for event in events:
            match event:
                case ContentDelta():
                    content += event.text
                case ReasoningDelta() if self._include_reasoning:
                    self._new_reasoning += event.text
                case CallStart():
                    self._begin(event.text)
                case ArgumentsDelta() if self._parallel or self.calls == 1:
                    if not self._new_calls:
                        self._new_calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
                    self._new_calls[-1]["function"]["arguments"] += event.text
        return content

    def _begin(self, name: str) -> None:
        self.calls += 1
        if self._parallel or self.calls == 1:
            function = {"name": name, "arguments": ""}
            call = {"index": self.calls - 1, "id": self._new_id(), "type": "function", "function": function}
            self._new_calls.append(call)

    def _new_id(self) -> str:
        if self._id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHABET) for _ in range(self._id_length))
