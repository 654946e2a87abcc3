"""Schemas of an answer of /v1/responses and of the events of its stream, for /openapi.json and tests."""

from typing import Any, Literal

from phase6_integration.wings.describe.response_schemas import ChatLogprobEntry, Response


class OutputTextPart(Response):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprobEntry]


class ReasoningPart(Response):
    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Response):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputCall(Response):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoning(Response):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningPart]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(Response):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Response):
    reasoning_tokens: int


class ResponsesUsage(Response):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Response):
    reason: Literal["max_output_tokens"]


class FailureDetails(Response):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponsesResponse(Response):
    """An answer, whole, or as it is at one moment of a stream. What it repeats of the request follows `usage`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: FailureDetails | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponsesUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    user: str | None
    background: Literal[False]
    previous_response_id: None
    prompt_cache_key: None
    safety_identifier: None
    service_tier: Literal["default"]
    store: Literal[False]
    truncation: Literal["disabled"]


class ResponsesEvent(Response):
    """An event of a stream. Which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponsesResponse | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: OutputTextPart | ReasoningPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatLogprobEntry] | None = None
    name: str | None = None
    arguments: str | None = None
    code: str | None = None  # of an error, as its message and param
    message: str | None = None
    param: str | None = None
