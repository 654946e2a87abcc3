"""ToolPlan: what the tools of a request and the model's reasoning mean for the grammar and the reading of answers."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.additions import Addition, Asked, Json, Prepare
from phase6_integration.api.errors import RequestError, unservable
from phase6_integration.api.schemas import SamplingFields
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields.grammars import Grammar, GrammarMaker, constrain, grammar_of
from phase6_integration.extras.fields.request_fields import AllowedTools, ChatRequest, ChosenTool, Function
from phase6_integration.extras.tools.call_grammar import Thinking, answer_grammar, call_rules
from phase6_integration.extras.tools.harmony import HarmonyReader
from phase6_integration.extras.tools.tool_formats import (
    BY_NAME,
    HARMONY,
    MESSAGES,
    THINK,
    Reasoning,
    ToolFormat,
    reasoning_of,
    tool_format,
    uses_tools,
)
from phase6_integration.extras.tools.tool_reader import ToolReader
from phase6_integration.extras.tools.tool_settings import ToolSettings
from phase6_integration.process.outputs import Chunk

TAIL = 16  # last tokens of a prompt, among which a template may write a tag of reasoning
# An object with no other keywords may be closed: none of these lets another part of the schema need a property.
PLAIN = {"type", "properties", "required", "title", "description", "strict", "$defs", "definitions", "$schema", "$id"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
WITH_TOOLS = {**HELLO, "tools": [{"type": "function", "function": {"name": "any"}}]}


class ToolPlan:
    """How the answers to one chat are constrained, and read, if there are tools or reasoning."""

    def __init__(self, settings: ToolSettings, server: ServerState, grammars: GrammarMaker, body: ChatRequest) -> None:
        """RequestError if the tools cannot be used as requested."""
        template, choice = server.tokenizers.template, body.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        self._tokenizer, self._grammars = server.tokenizers.tokenizer, grammars
        self._body = body
        self._content_field = grammars.field(body)  # that constrains the content
        self._lenient = {tool.function.name for tool in body.tools or () if tool.function.strict is False}
        self._functions = _callable(body)  # that may be called: the schema of the arguments of each
        self._must_call = bool(self._functions) and mode not in (None, "auto")
        if self._must_call and self._content_field and not self._content_field.startswith("response_format"):
            message = f"{self._content_field} is for the content, and an answer with required calls has none"
            raise unservable(self._content_field, message)
        self._format = _format(settings, template, auto=not self._must_call) if self._functions else None
        self._is_named = isinstance(choice, ChosenTool)  # the function is chosen by the request
        self._several = body.parallel_tool_calls is not False and not self._is_named  # calls in one answer
        self._reasoning = reasoning_of(template, settings.reasoning_parser)
        self._include_reasoning = body.include_reasoning is not False

    def grammar(self, prompt: Sequence[int], content: Grammar | None = None) -> Grammar | None:
        """The grammar of an answer, or None if any text will do. Required calls have one. Otherwise it is the
        grammar of `content`, with calls as an alternative. The reasoning before them is free."""
        content = None if self._must_call else content
        calls, thinking, notes = None, self._thinking(prompt), [*(content.notes if content else ())]
        if self._format is not None and (self._must_call or content is not None):
            try:
                self._grammars.check(json.dumps(self._functions), "tools")  # before they are rewritten
                arguments = {name: self._arguments(name, schema) for name, schema in self._functions.items()}
            except ValueError as error:
                raise unservable("tools", f"tools: {error}") from None
            texts = {name: grammar.text for name, grammar in arguments.items()}
            calls = call_rules(self._format, texts, self._several, self._tokenizer.marker)
            notes += [note for grammar in arguments.values() for note in grammar.notes]
        begun = self._reasoning.content if self._reasoning else ""
        if calls is None and (content is None or (thinking is Thinking.OVER and not begun)):
            return content
        try:
            grammar = answer_grammar(thinking, self._reasoning, calls, content and content.text, self._tokenizer.marker)
        except ValueError as error:
            raise unservable(self._content_field, f"{self._content_field}: {error}") from None
        return Grammar(self._grammars.check(grammar, "tools"), tuple(sorted({*notes})))

    def _arguments(self, name: str, schema: dict[str, Any]) -> Grammar:
        return self._grammars.of_schema(schema, self._body, name in self._lenient)

    @property
    def grammar_fields(self) -> tuple[str, ...]:
        """The fields that the grammar is made from."""
        content = () if self._must_call or self._content_field is None else (self._content_field,)
        return content if self._format is None else (*content, "tools")

    @property
    def finish_reason(self) -> str:
        """The finish reason of an answer with calls. As in OpenAI's API, a call chosen by the request is not
        reported."""
        return "stop" if self._is_named else "tool_calls"

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams: special tokens needed to read the answers stay in their text."""
        tokens = [token for marker in self.markers if (token := self._tokenizer.marker(marker)) is not None]
        return {} if all(map(self._tokenizer.token_bytes, tokens)) else {"skip_special_tokens": False}

    def reader(self, prompt: Sequence[int]) -> ToolReader:
        """A reader of one answer to this prompt."""
        kind = HarmonyReader if self._in_messages else ToolReader
        return kind(
            self._format,
            self._functions,
            reasons=self._reasoning is not None,
            begun=self._thinking(prompt) is Thinking.BEGUN,
            parallel=self._several,
            must_call=self._must_call,
            include_reasoning=self._include_reasoning,
        )

    def _thinking(self, prompt: Sequence[int]) -> Thinking:
        if self._reasoning is None:
            return Thinking.OVER
        return thinking_after(prompt, self._tokenizer, self._reasoning)

    @property
    def _in_messages(self) -> bool:
        return self._reasoning is MESSAGES or self._format is HARMONY

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers by which answers are read; without any, an answer is plain content."""
        tags = (self._reasoning.begin, self._reasoning.end) if self._reasoning else ()
        format = HARMONY if self._in_messages else self._format
        return (*tags, *(format.markers if format else ()))


def thinking_after(prompt: Sequence[int], tokenizer: Tokenizer, reasoning: Reasoning = THINK) -> Thinking:
    """What the template has written at the end of a prompt: some templates begin the reasoning, or end it if it is
    not wanted."""
    tail = b"".join(tokenizer.token_bytes(token, skip_special_tokens=False) for token in prompt[-TAIL:]).rstrip()
    if tail.endswith(reasoning.begin.encode()):
        return Thinking.BEGUN
    return Thinking.OVER if tail.endswith(reasoning.end.encode()) else Thinking.MAYBE


def _callable(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """The functions that an answer may call, each with the schema of its arguments."""
    functions, choice = {tool.function.name: _schema(tool.function) for tool in body.tools or ()}, body.tool_choice
    if choice not in (None, "none") and body.tools is None:
        raise unservable("tool_choice", "tool_choice says how tools are called, and there are none: tools is missing")
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        if name not in functions:
            raise unservable("tool_choice", f"tool_choice names {name}, which is not one of the tools")
        return {name: functions[name]}
    if isinstance(choice, AllowedTools):
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        if names - functions.keys():
            raise unservable("tool_choice", "tool_choice allows a function that is not one of the tools")
        return {name: schema for name, schema in functions.items() if name in names}
    return {} if choice == "none" else functions


def _format(settings: ToolSettings, template: str, auto: bool) -> ToolFormat:
    if not uses_tools(template):
        message = "the chat template of this model does not use tools; only tool_choice none is possible"
        raise unservable("tools", message)
    if auto and not settings.enable_auto_tool_choice:
        raise unservable("tool_choice", "this server was started with --no-enable-auto-tool-choice")
    format = tool_format(template, settings.tool_call_parser)
    if format is None:
        names = ", ".join(BY_NAME)
        message = f"how this model writes the calls of tools is not known; --tool-call-parser has {names}"
        raise unservable("tools", message)
    return format


def _schema(function: Function) -> dict[str, Any]:
    """The schema of the arguments. They have the listed parameters and no others, unless the schema mentions others:
    some models add parameters until their tokens are used up."""
    schema = function.parameters or NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise unservable("tools", f"tools: the parameters of {function.name} must be a schema of type object")
    listed, required = schema.get("properties"), schema.get("required", [])
    closes = isinstance(listed, dict) and isinstance(required, list) and {*map(str, required)} <= listed.keys()
    more = {"additionalProperties": False} if closes and schema.keys() <= PLAIN else {}
    return {**schema, **more, "type": "object"}


class ToolAnswers(Addition):
    """The answers to one chat, each split into its content and other fields of the message."""

    def __init__(self, plan: ToolPlan, prompt: Sequence[int], n: int) -> None:
        self._readers = [plan.reader(prompt) for _ in range(n)]
        self._called = plan.finish_reason

    def read(self, new: Chunk) -> bool:
        reader = self._readers[new.index]
        new.text = reader.push(new.text, new.finish_reason is not None)
        return reader.has_news

    def write(self, choice: Json, new: Chunk | None, whole: bool) -> None:
        if new is None:
            return
        reader = self._readers[new.index]
        found, message = reader.take(), choice["message" if whole else "delta"]
        if whole:
            for call in found.get("tool_calls", ()):
                del call["index"]
            if found and not message["content"]:
                message["content"] = None
        message |= found
        if new.finish_reason is FinishReason.STOP and reader.calls:
            choice["finish_reason"] = self._called


class ToolFields:
    """The feature. It comes after the one that makes the grammar of the content."""

    def __init__(self, server: ServerState, grammars: GrammarMaker) -> None:
        self._settings, self._server, self._grammars = server.settings.of(ToolSettings), server, grammars

    def __call__(self, body: SamplingFields) -> Prepare | None:
        return self._prepare if isinstance(body, ChatRequest) else None

    async def _prepare(self, asked: Asked) -> None:
        body, (prompt,) = asked.body, asked.prompts
        assert isinstance(body, ChatRequest)
        plan = ToolPlan(self._settings, self._server, self._grammars, body)
        constrain(asked, plan.grammar(prompt, grammar_of(asked)), plan.grammar_fields)
        asked.params |= plan.sampling
        if plan.markers:
            asked.additions.append(ToolAnswers(plan, prompt, body.n or 1))

    def capabilities(self) -> list[str]:
        """What a chat with tools, and the answer to one without, would be here."""
        found = []
        with contextlib.suppress(RequestError):  # without a chat template there is neither
            if ToolPlan(self._settings, self._server, self._grammars, ChatRequest.model_validate(HELLO)).markers:
                found.append("thinking")
            ToolPlan(self._settings, self._server, self._grammars, ChatRequest.model_validate(WITH_TOOLS))
            found.append("tools")
        return found


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    tools = ToolFields(server, app.state.grammars)
    server.features.append(tools)
    app.state.capabilities = tools.capabilities
