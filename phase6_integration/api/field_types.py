"""Types of the fields of request bodies: the base of the schemas, and what strings, numbers and lists may be.

Types are strict: "5" is not a number and true is not 1. null means not given. What may be millions of items long fails
fast. The fields that OpenAI and vLLM have and this server has not are known too: hints, which have no effect (`Hint`),
and others, which are allowed as long as their value changes nothing (`Unsupported`).
"""

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from phase0_request.params import MAX_STOP_LENGTH, MAX_STOP_TOKENS, MAX_TOKEN_ID, MAX_TOKENS
from phase6_integration.api.errors import UNSUPPORTED

MAX_VARIABLES = 64  # of a chat template
RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
    *("conversations", "return_assistant_tokens_mask", "self"),  # of the call that renders
}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


class FromClient(RequestModel):
    """An object that a client sends back unchanged: unknown keys have no effect."""

    model_config = ConfigDict(extra="ignore")


class Unsupported:
    """A field that this server does not support. It allows null and these values, which change nothing."""

    def __init__(self, *harmless: Any) -> None:
        self.harmless = harmless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.harmless], "description": "Not supported; these values change nothing."}

    def _validate(self, value: Any) -> None:
        if value is not None and not any(type(value) is type(other) and value == other for other in self.harmless):
            only = " or ".join(json.dumps(other) for other in (None, *self.harmless))
            raise PydanticCustomError(UNSUPPORTED, "except as {only}", {"only": only})


Hint = Annotated[Any, AfterValidator(lambda _: None), Field(description="No effect.")]


def _is_free(name: str) -> str:
    if name in RESERVED:
        raise PydanticCustomError("reserved", "this variable of the template has a field of its own, or is no client's")
    return name


def by_kind(message: str) -> Discriminator:
    """Chooses between the text, the list and the objects of a union, which `message` names."""
    tags: dict[type, str] = {str: "=text", list: "=list", dict: "=tool"}

    def kind(value: Any) -> str | None:
        some = isinstance(value, dict) and value.get("type") == "allowed_tools"
        return "=some_tools" if some else tags.get(type(value))

    return Discriminator(kind, custom_error_type="kind", custom_error_message=message)


def _kind_of_prompt(value: Any) -> str | None:
    """Which of the four forms a prompt has, so that an error is about that form alone."""
    if not isinstance(value, list):
        return "=text" if isinstance(value, str) else None
    kinds = {*map(type, value)}
    if not kinds & {str, list}:
        return "=tokens" if kinds else "=texts"
    return "=texts" if kinds == {str} else "=token_lists" if kinds == {list} else None


def or_minus_one(least: int) -> WithJsonSchema:
    lengths = {"type": "integer", "minimum": least, "maximum": MAX_TOKENS}
    return WithJsonSchema({"anyOf": [lengths, {"const": -1}, {"type": "null"}], "default": None})


Name = Annotated[str, Field(min_length=1, max_length=256)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Role = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
TemplateVariable = Annotated[str, Field(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$"), AfterValidator(_is_free)]
TemplateVariables = Annotated[
    dict[TemplateVariable, Any],
    Field(
        max_length=MAX_VARIABLES,
        json_schema_extra={"propertyNames": {"not": {"enum": sorted(RESERVED)}}, "additionalProperties": False},
    ),
]
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[Tokens, Tag("=tokens")]
    | Annotated[TokenLists, Tag("=token_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="a prompt is a string, or a list of one kind: strings, token ids or lists of token ids",
    ),
]
Length = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
OutputLength = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
# As llama.cpp and Ollama have it, -1 is not given: as many tokens as the model likes, or fit.
minus_one = BeforeValidator(lambda given: None if given == -1 else given)
OptionalLength = Annotated[OutputLength | None, minus_one, or_minus_one(1)]
Choices = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTokens = Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)]


def bounded(low: float, high: float) -> Any:
    """An optional number within bounds, both included."""
    return Field(None, ge=low, le=high, allow_inf_nan=False)
