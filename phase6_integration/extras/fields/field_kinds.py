"""Types of the fields that only extras have: sets of tokens, biases, schemas, counts of alternatives."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from phase0_request.params import MAX_BIASES, MAX_LOGPROBS, MAX_SET_ID, MAX_TOKENS, TokenSet
from phase6_integration.api.field_types import Length, minus_one, or_minus_one


def _as_set(value: Any, check: ValidatorFunctionWrapHandler) -> TokenSet:
    """Token ids as a set, since a body lives as long as its answer. An existing set stays as it is."""
    return value if isinstance(value, TokenSet) else TokenSet.of("allowed_token_ids", check(value))


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise PydanticCustomError("schema", "a JSON schema is an object, or the text of one")
    return value


OptionalOrNoLength = Annotated[Length | None, minus_one, or_minus_one(0)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
AllowedTokens = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_SET_ID)]],
    Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True),
    WrapValidator(_as_set),
]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
BiasedToken = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Biases = Annotated[
    dict[BiasedToken, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
]
Whitespace = Annotated[str, Field(max_length=64)]
_DESCRIBED = {"anyOf": [{"type": "object"}, {"type": "string"}], "description": "A JSON schema, or the text of one."}
Schema = Annotated[Any, AfterValidator(_schema), WithJsonSchema(_DESCRIBED)]
