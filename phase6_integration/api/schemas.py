"""Request schemas: every field that a client may send, typed and bounded. An unknown field is an error.

Bounds that depend on the model or the settings are checked where a field is used.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from phase0_request.params import MAX_BAD_WORDS, MAX_STOPS, MAX_TOKEN_ID, MAX_TOKENS, REPETITION_PENALTY
from phase0_request.request import MAX_PRIORITY, MAX_SALT
from phase6_integration.api.field_types import (
    AllowedTokens,
    Biases,
    Choices,
    FromClient,
    FunctionName,
    Hint,
    Length,
    Name,
    OptionalLength,
    OptionalOrNoLength,
    Prompt,
    RequestModel,
    Role,
    Schema,
    Stop,
    StopTokens,
    TemplateVariables,
    Text,
    Texts,
    TopLogprobs,
    Unsupported,
    Whitespace,
    bounded,
    by_kind,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts of all messages together
MAX_USER = 256  # characters
MAX_TOOLS = 512
MAX_CALLS = 512  # of one message
MAX_DOCUMENTS = 512


class StreamOptions(RequestModel):
    include_usage: bool | None = None  # a last chunk with the usage and no choices
    continuous_usage_stats: bool | None = None  # with include_usage: in every chunk, the usage so far
    include_obfuscation: Hint = None


class NamedSchema(RequestModel):
    schema_: Schema = Field(alias="schema")
    name: Hint = None
    description: Hint = None
    strict: bool | None = None  # false: what cannot be enforced is noted, not refused


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")  # llama.cpp's, with json_object


class StructuredOutputs(RequestModel):
    """vLLM's. One constraint, and what JSON looks like."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None
    whitespace_pattern: Whitespace | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: Hint = None  # there is one backend
    disable_additional_properties: bool | None = None  # an object that lists properties has no others
    structural_tag: Annotated[Any, Unsupported()] = None


class StructuredFields(RequestModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Whitespace | None = None
    guided_decoding_backend: Hint = None


class SamplingFields(StructuredFields):
    """The fields that completions and chat completions share."""

    model: Name | None = None
    max_tokens: OptionalLength = None
    min_tokens: Length | None = None
    temperature: float | None = bounded(0, 100)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = bounded(-1, MAX_TOKEN_ID)
    min_p: float | None = bounded(0, 1)
    n: Choices | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("=text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("=list")],
            by_kind(f"stop is a string or a list of up to {MAX_STOPS} strings"),
        ]
        | None
    ) = None
    stop_token_ids: StopTokens | None = None
    seed: int | None = bounded(-(1 << 63), (1 << 63) - 1)
    presence_penalty: float | None = bounded(-2, 2)
    frequency_penalty: float | None = bounded(-2, 2)
    repetition_penalty: float | None = bounded(*REPETITION_PENALTY)
    logit_bias: Biases | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS // 2)] | None = None  # each in two forms
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # default: true
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None  # keep the last so many
    truncation_side: Annotated[Any, Unsupported("left")] = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = bounded(-MAX_PRIORITY, MAX_PRIORITY)  # lower values run earlier
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None  # for the access log
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    best_of: Choices | None = None  # only as many as n
    metadata: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    store: Hint = None
    early_stopping: Annotated[Any, Unsupported(False)] = None
    kv_transfer_params: Annotated[Any, Unsupported({})] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0)] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    prompt_embeds: Annotated[Any, Unsupported()] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False)] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(True, False)] = None  # no supported tokenizer has any
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: OptionalOrNoLength = None  # 0: only the prompt, with echo
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # default: true
    suffix: Annotated[Any, Unsupported("")] = None


class TextPart(FromClient):
    type: Literal["text"]
    text: str


class FunctionCall(FromClient):
    name: FunctionName
    arguments: str  # a JSON object


class ToolCall(FromClient):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("=list")],
    by_kind("the content of a message is a string or a list of text parts"),
]


class PlainMessage(FromClient):
    role: Role  # any that the template takes; an assistant's is of the next class
    content: Content
    name: Name | None = None
    tool_call_id: Name | None = None


class AssistantMessage(FromClient):
    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    function_call: Annotated[Any, Unsupported()] = None


def _kind_of_message(value: Any) -> str:
    return "=assistant" if isinstance(value, dict) and value.get("role") == "assistant" else "=other"


def _few_parts(messages: "list[AnyMessage]") -> "list[AnyMessage]":
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", f"the messages may have at most {MAX_PARTS} text parts together")
    return messages


AnyMessage = Annotated[
    Annotated[AssistantMessage, Tag("=assistant")] | Annotated[PlainMessage, Tag("=other")],
    Discriminator(_kind_of_message),
]
Messages = Annotated[
    list[AnyMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_few_parts),
]


class Function(FromClient):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # false: what cannot be enforced is noted


class Tool(FromClient):
    type: Literal["function"]
    function: Function


class ChosenFunction(FromClient):
    name: FunctionName


class ChosenTool(FromClient):
    type: Literal["function"]
    function: ChosenFunction


class ToolSubset(FromClient):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(FromClient):
    """Some of the tools: the prompt has all of them, and its prefix stays in the cache."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


class ConversationFields(RequestModel):
    """What a chat template is given."""

    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None  # default: true, unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class Prediction(RequestModel):
    """What the client expects to get: drafts of the answer."""

    type: Literal["content"]
    content: Content


class ChatRequest(SamplingFields, ConversationFields):
    max_completion_tokens: OptionalLength = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None  # on top of those of the template; default: false
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("=text")]
            | Annotated[ChosenTool, Tag("=tool")]
            | Annotated[AllowedTools, Tag("=some_tools")],
            by_kind(
                'tool_choice is none, auto, required, {"type": "function", "function": {"name": ...}} or allowed_tools'
            ),
        ]
        | None
    ) = None  # default: auto
    parallel_tool_calls: bool | None = None  # default: true
    include_reasoning: bool | None = None  # default: true
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Hint = None
    audio: Annotated[Any, Unsupported()] = None
    chat_template: Annotated[Any, Unsupported()] = None
    echo: Annotated[Any, Unsupported(False)] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None
    modalities: Annotated[Any, Unsupported([], ["text"])] = None
    web_search_options: Annotated[Any, Unsupported()] = None
