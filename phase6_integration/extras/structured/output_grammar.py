"""Structured output: the fields that ask for it, in OpenAI's form and in vLLM's, and the grammar that each stands for.

    response_format, structured_outputs.json or guided_json, ... -> the text of a grammar -> the engine

A JSON schema is rewritten for llguidance (`schema_rewrites`). If part of it still cannot be enforced, the request ends
with an error, unless the schema says `strict: false`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from llguidance import LLMatcher
from pydantic_core import from_json

from phase6_integration.api.additions import Asked, Prepare
from phase6_integration.api.errors import unservable
from phase6_integration.api.schemas import SamplingFields
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields.grammars import Grammar, constrain
from phase6_integration.extras.fields.request_fields import ResponseFormat, StructuredFields
from phase6_integration.extras.structured.schema_rewrites import Rewrite
from phase6_integration.process.async_engine import AsyncEngine

MAX_GRAMMAR = 1 << 18  # characters, of a grammar or a schema
MAX_CHOICES = 10_000
ANY_OBJECT = {"type": "object"}
# Between two tokens of JSON: a space, or a new line with up to 24 spaces or 8 tabs. Without a bound, a model may write
# white space until its tokens are used up.
WHITESPACE = r"\x20|\n(\x20{0,24}|\t{0,8})"
# A pattern of JSON's white space. Any other would make the output something else than JSON.
BLANK = re.compile(r"((\\[nrt]|[ \n\r\t]|\[(\\[nrt]|[ \n\r\t])+\]|[()|])([*+?]|\{[0-9]{1,4}(,[0-9]{0,4})?\})?)*")

KINDS = {"json": "json_", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}


class Given(NamedTuple):
    """A constraint, and the path of its field."""

    param: str
    kind: str
    value: Any
    lenient: bool = False  # what cannot be enforced is left out, and noted


class OutputGrammars:
    """The grammars that requests ask for; as a feature, it has answers follow them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._has_tokenizer = engine.tokenizer is not None

    def __call__(self, body: SamplingFields) -> Prepare | None:
        if not isinstance(body, StructuredFields) or (grammar := self.of(body)) is None:
            return None

        async def prepare(asked: Asked) -> None:
            constrain(asked, grammar, [self.field(body) or ""])

        return prepare

    def field(self, body: StructuredFields) -> str | None:
        return next((given.param for given in _given(body)), None)

    def of(self, body: StructuredFields) -> Grammar | None:
        """The text of the one constraint of a request. A RequestError if there are several."""
        constraints = [*_given(body)]
        if len(constraints) > 1:
            names = " and ".join(given.param for given in constraints)
            raise unservable(constraints[1].param, f"only one constraint of the output may be given, got {names}")
        path, pattern = _whitespace(body)
        calls = getattr(body, "tools", None) and getattr(body, "tool_choice", None) not in (None, "auto", "none")
        if path is not None and not (calls or (constraints and constraints[0].kind.startswith("json"))):
            raise unservable(path, f"{path} is for JSON, and no JSON schema is given")
        if path is not None and pattern is not None and not BLANK.fullmatch(pattern):
            raise unservable(path, rf"{path}: a pattern of JSON's white space is needed, such as [ \n\t]{{0,8}}")
        if body.structured_outputs is not None and not (constraints or calls):
            raise unservable("structured_outputs", f"structured_outputs: one of {', '.join(KINDS)} is needed")
        if not constraints:
            return None
        grammar = _grammar(constraints[0], pattern, _closes(body))
        self.check(grammar.text, constraints[0].param)
        return grammar

    def check(self, grammar: str, param: str) -> str:
        if not self._has_tokenizer:
            message = f"{param}: this model has no tokenizer, which structured output needs"
            raise unservable(param, message, "no_tokenizer")
        if len(grammar) > MAX_GRAMMAR:
            message = f"a grammar may have at most {MAX_GRAMMAR} characters, this one has {len(grammar)}"
            raise unservable(param, f"{param}: {message}")
        return grammar

    def of_schema(self, schema: Mapping[str, Any], body: StructuredFields, lenient: bool) -> Grammar:
        return _of_schema(schema, _whitespace(body)[1], _closes(body), lenient)


def json_grammar(schema: Mapping[str, Any], whitespace: str | None = WHITESPACE) -> str:
    """The grammar of a JSON schema. `whitespace`: a pattern; None allows none at all."""
    guidance = {"whitespace_pattern": whitespace, "whitespace_flexible": whitespace is not None}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": guidance}}]}, allow_nan=False)


def _given(body: StructuredFields) -> Iterator[Given]:
    outputs = body.structured_outputs
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    for kind, name in KINDS.items():
        if outputs is not None and (value := getattr(outputs, name)) is not None:
            yield Given(f"structured_outputs.{kind}", kind, value)
        if (value := getattr(body, f"guided_{kind}", None)) is not None:
            yield Given(f"guided_{kind}", kind, value)


def _of_format(format: ResponseFormat) -> Iterator[Given]:
    if (format.type == "json_schema") != (format.json_schema is not None):
        raise unservable("response_format.json_schema", "response_format: type json_schema and json_schema go together")
    if format.schema_ is not None and format.type != "json_object":
        raise unservable("response_format.schema", "response_format: schema goes together with type json_object")
    if format.json_schema is not None:
        lenient = format.json_schema.strict is False
        yield Given("response_format.json_schema.schema", "json", format.json_schema.schema_, lenient)
    elif format.schema_ is not None:
        yield Given("response_format.schema", "json", format.schema_)
    elif format.type == "json_object":
        yield Given("response_format", "json_object", True)


def _whitespace(body: StructuredFields) -> tuple[str | None, str | None]:
    """The path of the field that gives the pattern of white space, and the pattern."""
    outputs = body.structured_outputs
    if outputs is not None and outputs.disable_any_whitespace:
        return "structured_outputs.disable_any_whitespace", None
    if outputs is not None and outputs.whitespace_pattern is not None:
        return "structured_outputs.whitespace_pattern", outputs.whitespace_pattern.replace(r"\s", r"[ \n\r\t]")
    if body.guided_whitespace_pattern is not None:
        return "guided_whitespace_pattern", body.guided_whitespace_pattern.replace(r"\s", r"[ \n\r\t]")
    return None, WHITESPACE


def _closes(body: StructuredFields) -> bool:
    return bool(body.structured_outputs and body.structured_outputs.disable_additional_properties)


def _of_schema(schema: Mapping[str, Any], whitespace: str | None, closes: bool, lenient: bool) -> Grammar:
    try:
        rewrite = Rewrite(schema, lenient, closes)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    return Grammar(json_grammar(rewrite.schema, whitespace), rewrite.notes)


def _grammar(given: Given, whitespace: str | None, closes: bool) -> Grammar:
    """The grammar of a constraint."""
    try:
        match given.kind:
            case "json":
                schema = from_json(given.value, allow_inf_nan=False) if isinstance(given.value, str) else given.value
                if not isinstance(schema, dict):
                    raise ValueError("a JSON schema is an object")
                if "x-guidance" in schema:
                    raise ValueError("x-guidance is not supported; whitespace_pattern is")
                return _of_schema(schema, whitespace, closes, given.lenient)
            case "json_object":
                return Grammar(json_grammar(ANY_OBJECT, whitespace))
            case "regex":
                return Grammar(LLMatcher.grammar_from_regex(given.value))
            case "choice":
                if len(given.value) > MAX_CHOICES:
                    raise ValueError(f"at most {MAX_CHOICES} choices are allowed, got {len(given.value)}")
                choices = " | ".join(map(json.dumps, given.value))  # one terminal: cheap, and what they share is forced
                return Grammar(f"start: CHOICE\nCHOICE: {choices}")
    except ValueError as error:
        raise unservable(given.param, f"{given.param}: {error}") from None
    return Grammar(str(given.value))


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    app.state.grammars = OutputGrammars(server.engine)
    server.features.append(app.state.grammars)
