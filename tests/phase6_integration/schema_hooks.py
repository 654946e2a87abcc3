"""What the run of schemathesis in test_schema.py checks beside its own checks."""

import re
from typing import Any

import schemathesis
from schemathesis import GenerationMode

# What no JSON schema can say: fields that are right each by itself and do not go together, or not with this model.
MEANING = {"conflicting_values", "context_length_exceeded", "empty_prompt", "token_outside_vocabulary"}

# Fields that are refused as parts of the chat request that a request of another API becomes.
BY_CHAT = {
    "/v1/responses": ("input", "tools", "tool_choice", "text.format"),
    "/v1/messages": ("messages", "tools", "tool_choice", "output_config.format"),
    "/v1/messages/count_tokens": ("messages", "tools", "tool_choice", "output_config.format"),
    "/api/chat": ("messages", "tools", "format", "options"),
    "/api/generate": ("format", "options"),
}

INTEGRAL = re.compile(r"should be a valid integer, got -?\d+\.0\b")


@schemathesis.hook
def map_body(ctx: Any, body: Any) -> Any:
    """Most bodies ask for the model that is served: any other name is a 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and 1 <= len(body["model"]) <= 256:
        return {**body, "model": "tiny_chat"}
    return body


def error_of(response: Any) -> Any:
    """Of Ollama's routes the error is the message, and the rest is beside it."""
    content = response.json()
    return {**content, "message": content["error"]} if isinstance(content["error"], str) else content["error"]


@schemathesis.check
def refuses_what_its_schema_allows_only_for_its_meaning(ctx: Any, response: Any, case: Any) -> None:
    """`positive_data_acceptance` would have every body accepted that the schema allows; some are refused, with a 400.
    It expects that, and this hook narrows it: such a 400 has one of the codes above, never that of a type. A 404 means
    that a model is not served."""
    if response.status_code == 404 and case.meta.generation.mode is GenerationMode.POSITIVE and case.method == "POST":
        assert error_of(response)["code"] == "model_not_found", "a body that the schema allows"
    if response.status_code == 400 and case.meta.generation.mode is GenerationMode.POSITIVE:
        error = error_of(response)
        if INTEGRAL.search(error["message"]):  # an integer to JSON Schema, and a float to every strict parser
            return
        if (error["param"] or "").startswith(BY_CHAT.get(case.path, ())):
            return
        assert error["code"] in MEANING, f"the schema allows what was refused: {error}"


@schemathesis.check
def every_error_has_the_one_shape(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code >= 400 and case.path.startswith("/api/"):
        assert set(response.json()) == {"error", "param", "code"}
    elif response.status_code >= 400:
        named = {"type", "request_id"} if case.path.startswith("/v1/messages") else set()  # Anthropic's
        assert set(response.json()) == {"error", *named}
        assert set(response.json()["error"]) - {"details"} == {"message", "type", "param", "code"}
