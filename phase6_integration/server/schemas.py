"""Request schemas: every field that a client may send, typed and bounded. An unknown field is an error.

Types are strict: "5" is not a number and true is not 1. null means not given. What may be millions of items long fails
fast.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    Tag,
)
from pydantic_core import PydanticCustomError

from phase0_request.params import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    REPETITION_PENALTY,
)
from phase0_request.request import MAX_PRIORITY, MAX_SALT
from phase6_integration.server.bounds import NAMED, AtMost, FewItems, Hint, InVocabulary, Unsupported

MAX_PARTS = 1024  # text parts of all messages together
MAX_USER = 256  # characters


def _few_parts(messages: "list[Message]") -> "list[Message]":
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", f"the messages may have at most {MAX_PARTS} text parts together")
    return messages


def _kind_of_text(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


def _kind_of_prompt(value: Any) -> str | None:
    """Which of its four forms a prompt has, by its first element, so that an error is about that form alone."""
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "=token_lists" if isinstance(first, list) else "=texts" if isinstance(first, str) else "=tokens"


def _kind_of_tokenize(value: Any) -> str:
    return "=chat" if isinstance(value, dict) and "messages" in value else "=text"


Name = Annotated[str, Field(min_length=1, max_length=256)]
ModelName = Annotated[Name, Field(json_schema_extra={"enum": NAMED + "names"})]
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True), FewItems("choices")]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), InVocabulary()]
TokenLists = Annotated[list[Tokens], Field(min_length=1, fail_fast=True), FewItems("choices")]
Prompt = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[Tokens, Tag("=tokens")]
    | Annotated[TokenLists, Tag("=token_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="a prompt is a string, a list of strings, a list of token ids or a list of such",
    ),
]
Length = Annotated[int, Field(ge=0), AtMost("context")]
OutputLength = Annotated[int, Field(ge=1), AtMost("context")]
TopLogprobs = Annotated[int, Field(ge=0), AtMost("logprobs")]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopTokens = Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS), InVocabulary()]
AllowedTokens = Annotated[list[Token], Field(min_length=1, fail_fast=True), FewItems("vocabulary"), InVocabulary()]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
BiasedToken = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Biases = Annotated[
    dict[BiasedToken, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
    InVocabulary(),
]


def bounded(low: float, high: float) -> Any:
    """An optional number within bounds, both included."""
    return Field(None, ge=low, le=high, allow_inf_nan=False)


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


class StreamOptions(RequestModel):
    include_usage: bool | None = None  # a last chunk with the usage and no choices
    continuous_usage_stats: bool | None = None  # in every chunk, the usage so far
    include_obfuscation: Hint = None


class ResponseFormat(RequestModel):
    type: Literal["text"]


class SamplingFields(RequestModel):
    """The fields that completions and chat completions share."""

    model: ModelName | None = None
    max_tokens: OutputLength | None = None
    min_tokens: Length | None = None
    temperature: float | None = bounded(0, 100)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = bounded(-1, MAX_TOKEN_ID)
    min_p: float | None = bounded(0, 1)
    n: Annotated[int, Field(ge=1), AtMost("choices")] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("=text")] | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("=list")],
            Discriminator(
                _kind_of_text,
                custom_error_type="stop",
                custom_error_message=f"stop is a string or a list of up to {MAX_STOPS} strings",
            ),
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
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS // 2)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # default: true
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AtMost("context")] | None = None  # keep the last so many
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = bounded(-MAX_PRIORITY, MAX_PRIORITY)  # lower values run earlier
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None  # for the access log
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    best_of: Annotated[int, Field(ge=1), AtMost("choices")] | None = None  # only as many as n
    metadata: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    safety_identifier: Hint = None
    service_tier: Hint = None
    store: Hint = None
    early_stopping: Annotated[Any, Unsupported(False)] = None
    guided_choice: Annotated[Any, Unsupported()] = None
    guided_decoding_backend: Annotated[Any, Unsupported()] = None
    guided_grammar: Annotated[Any, Unsupported()] = None
    guided_json: Annotated[Any, Unsupported()] = None
    guided_regex: Annotated[Any, Unsupported()] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported()] = None
    kv_transfer_params: Annotated[Any, Unsupported({})] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0)] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    prompt_embeds: Annotated[Any, Unsupported()] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(True, False)] = None  # no supported tokenizer has any
    structured_outputs: Annotated[Any, Unsupported()] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None


class CompletionRequest(SamplingFields):
    prompt: Prompt
    max_tokens: Length | None = None  # 0: only the prompt, with echo
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None  # default: true
    suffix: Annotated[Any, Unsupported("")] = None


class FromClient(RequestModel):
    """What a client sends back as it got it: unknown keys have no effect."""

    model_config = ConfigDict(extra="ignore")


class TextPart(FromClient):
    type: Literal["text"]
    text: str


class Message(FromClient):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("=list")],
        Discriminator(
            _kind_of_text,
            custom_error_type="content",
            custom_error_message="the content of a message is a string or a list of text parts",
        ),
    ]

    function_call: Annotated[Any, Unsupported()] = None
    tool_calls: Annotated[Any, Unsupported([])] = None

    @property
    def text(self) -> str:
        """The content as one string; text parts are joined by newlines, as in vLLM."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


Messages = Annotated[
    list[Message], Field(min_length=1, fail_fast=True), FewItems("messages"), AfterValidator(_few_parts)
]


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: OutputLength | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None  # on top of those of the template; default: false
    verbosity: Hint = None
    audio: Annotated[Any, Unsupported()] = None
    chat_template: Annotated[Any, Unsupported()] = None
    chat_template_kwargs: Annotated[Any, Unsupported({})] = None
    continue_final_message: Annotated[Any, Unsupported(False)] = None
    documents: Annotated[Any, Unsupported([])] = None
    echo: Annotated[Any, Unsupported(False)] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    include_reasoning: Annotated[Any, Unsupported(False, True)] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None
    modalities: Annotated[Any, Unsupported([], ["text"])] = None
    parallel_tool_calls: Annotated[Any, Unsupported(False, True)] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported("none")] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    tools: Annotated[Any, Unsupported([])] = None
    web_search_options: Annotated[Any, Unsupported()] = None


class TokenizeText(RequestModel):
    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool | None = None  # default: true
    return_token_strs: bool | None = None


class TokenizeChat(RequestModel):
    model: ModelName | None = None
    messages: Messages
    add_generation_prompt: bool | None = None  # default: true
    return_token_strs: bool | None = None


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizeText, Tag("=text")] | Annotated[TokenizeChat, Tag("=chat")],
            Discriminator(_kind_of_tokenize),
        ]
    ]
):
    """A text, or a conversation."""


class DetokenizeRequest(RequestModel):
    model: ModelName | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True), InVocabulary()]
