"""Reading: a body into a request model, or into an error that names what is wrong with it."""

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from phase6_integration.server.errors import RequestError, bad_value, invalid

MANY = 1000  # errors, beyond which even the first is not looked for: that takes as long as all of them
M = TypeVar("M", bound=BaseModel)


async def read(model: type[M], request: Request) -> M:
    """The body as this model. Parsed once, in one pass, without anything in between that could be made huge. Of a field
    that is given twice the last counts: the parser has no word for it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = "the body must be JSON: send it with `Content-Type: application/json`"
        raise RequestError(415, message, code="unsupported_media_type")
    body = await request.body()
    if not body:
        raise bad_value(None, "the body is empty; a JSON object is needed", "bad_json")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MANY:
            raise bad_value(None, f"the body is wrong in {error.error_count()} places") from None
        raise invalid(error.errors(include_url=False)) from None
