"""Request schemas with all fields: the core's, those of extras, and those that only OpenAI's and vLLM's servers have.

The last kind are hints, which have no effect (`Hint`), and fields whose value must change nothing (`Unsupported`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from phase0_request.params import MAX_BAD_WORDS, REPETITION_PENALTY
from phase6_integration.api import schemas
from phase6_integration.api.field_types import (
    Choices,
    FromClient,
    FunctionName,
    Hint,
    Length,
    RequestModel,
    Stop,
    Text,
    Texts,
    Unsupported,
    bounded,
    by_kind,
)
from phase6_integration.extras.fields.field_kinds import (
    AllowedTokens,
    Biases,
    OptionalOrNoLength,
    Schema,
    TopLogprobs,
    Whitespace,
)

MAX_TOOLS = 512


class StreamOptions(schemas.StreamOptions):
    include_obfuscation: Hint = None


# Structured output.


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


# Sampling, and what is told of tokens.


class SamplingFields(schemas.SamplingFields, StructuredFields):
    """The fields that completions and chat completions share."""

    min_tokens: Length | None = None
    presence_penalty: float | None = bounded(-2, 2)
    frequency_penalty: float | None = bounded(-2, 2)
    repetition_penalty: float | None = bounded(*REPETITION_PENALTY)
    logit_bias: Biases | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS // 2)] | None = None  # each in two forms
    truncation_side: Annotated[Any, Unsupported("left")] = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
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


class CompletionRequest(SamplingFields, schemas.CompletionRequest):
    max_tokens: OptionalOrNoLength = None  # 0: only the prompt, with echo
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None


# Tools.


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
    """Some of the tools. The prompt has all of them, so its prefix stays in the cache."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


class ConversationFields(schemas.ConversationFields):
    """The input of a chat template."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def variables(self) -> dict[str, Any]:
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        return {"tools": tools or None, **super().variables()}


class Prediction(RequestModel):
    """What the client expects the answer to be; it serves as drafts."""

    type: Literal["content"]
    content: schemas.Content


class ChatRequest(SamplingFields, ConversationFields, schemas.ChatRequest):
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
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
    verbosity: Hint = None
    audio: Annotated[Any, Unsupported()] = None
    chat_template: Annotated[Any, Unsupported()] = None
    echo: Annotated[Any, Unsupported(False)] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None
    modalities: Annotated[Any, Unsupported([], ["text"])] = None
    web_search_options: Annotated[Any, Unsupported()] = None


# Names that fields of this server have in Ollama, llama.cpp, SGLang and transformers.
ELSEWHERE = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "'max_tokens'"),
    **dict.fromkeys(("format", "json_schema"), "'response_format'"),
    "regex": "'structured_outputs.regex'",
    **dict.fromkeys(("ebnf", "grammar"), "'structured_outputs.grammar'"),
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "'repetition_penalty'"),
    "stop_sequences": "'stop'",
    "options": "fields of the request, such as 'temperature'",
    "do_sample": "'temperature', which is 0 for no sampling",
    **dict.fromkeys(("n_ctx", "num_ctx"), "--max-model-len of the server"),
    **dict.fromkeys(("truncate", "truncation"), "'truncate_prompt_tokens', which is -1 for as many as fit"),
    "enable_thinking": "'chat_template_kwargs.enable_thinking'",
    "system": "a message of role system",
}
