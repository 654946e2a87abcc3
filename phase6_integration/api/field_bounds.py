"""Bounds of request fields, as annotations of the schemas.

Some bounds depend on the model or the settings: those are `AtMost`, `FewItems` and `InVocabulary`. Validation takes
their values from its context, a `FieldBounds`; in a JSON schema they are names, which `FieldBounds.resolve`
replaces.

The fields that OpenAI and vLLM have and this server has not are known too: hints, which have no effect (`Hint`), and
others, which are allowed as long as their value changes nothing (`Unsupported`).
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from phase0_request.params import MAX_LOGPROBS
from phase6_integration.api.errors import UNSUPPORTED, VOCABULARY
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

NAMED = "limit:"  # in a JSON schema, begins the name of a limit


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


@dataclass(frozen=True, slots=True)
class FieldBounds:
    """The bounds of one server: the validation context of every schema."""

    names: tuple[str, ...]  # of the model
    vocabulary: int  # token ids run from 0 to one less
    context: int  # tokens of a prompt and its completion
    choices: int  # n x prompts
    messages: int
    logprobs: int

    @classmethod
    def of(cls, engine: AsyncEngine, settings: ServerSettings) -> "FieldBounds":
        return cls(
            names=settings.served_model_names,
            vocabulary=engine.config.vocab_size,
            context=engine.max_model_len,
            choices=settings.max_choices,
            messages=settings.max_messages,
            logprobs=min(settings.max_logprobs, MAX_LOGPROBS),
        )

    def resolve(self, schema: Any) -> Any:
        """A JSON schema with the values of these limits in the place of their names."""
        if isinstance(schema, dict):
            return {key: self.resolve(value) for key, value in schema.items()}
        if isinstance(schema, list):
            return [self.resolve(value) for value in schema]
        if isinstance(schema, str) and schema.startswith(NAMED):
            limit = getattr(self, schema.removeprefix(NAMED))
            return list(limit) if isinstance(limit, tuple) else limit
        return schema


class _Bound:
    """An annotation that checks a value against a limit from the validation context."""

    def __init__(self, limit: str) -> None:
        self.limit = limit

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(schema)
        self.describe(found, NAMED + self.limit)
        return found

    def _validate(self, value: Any, info: ValidationInfo) -> Any:
        self.check(value, getattr(info.context, self.limit))
        return value

    def describe(self, schema: dict[str, Any], limit: str) -> None:
        raise NotImplementedError

    def check(self, value: Any, limit: int) -> None:
        raise NotImplementedError


class AtMost(_Bound):
    """A number up to a limit."""

    def describe(self, schema: dict[str, Any], limit: str) -> None:
        schema["maximum"] = limit

    def check(self, value: Any, limit: int) -> None:
        if value > limit:
            raise PydanticKnownError("less_than_equal", {"le": limit})


class FewItems(_Bound):
    """A list of at most so many items."""

    def describe(self, schema: dict[str, Any], limit: str) -> None:
        schema["maxItems"] = limit

    def check(self, value: Any, limit: int) -> None:
        if len(value) > limit:
            counts = {"field_type": "List", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", counts)


class InVocabulary(_Bound):
    """A list, or the keys of an object, that are token ids of this model."""

    def __init__(self) -> None:
        super().__init__("vocabulary")

    def describe(self, schema: dict[str, Any], limit: str) -> None:
        if "items" in schema:  # the keys of an object can have a pattern, but no maximum
            schema["items"] = {"type": "integer", "minimum": 0, "exclusiveMaximum": limit}

    def check(self, value: Any, limit: int) -> None:
        if value and (most := max(map(int, value) if isinstance(value, dict) else value)) >= limit:
            message = "token ids of this model run from 0 to {last}, got {most}"
            raise PydanticCustomError(VOCABULARY, message, {"last": limit - 1, "most": most})


class Unsupported:
    """A field that this server does not have. Only null and these values are allowed: they change nothing."""

    def __init__(self, *harmless: Any) -> None:
        self.harmless = harmless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.harmless], "description": "Not supported; these values change nothing."}

    def _validate(self, value: Any) -> None:
        if value is not None and not any(type(value) is type(one) and value == one for one in self.harmless):
            only = " or ".join(json.dumps(one) for one in (None, *self.harmless))
            raise PydanticCustomError(UNSUPPORTED, "except as {only}", {"only": only})


Hint = Annotated[Any, AfterValidator(lambda _: None), Field(description="No effect.")]
