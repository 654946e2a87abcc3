"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from phase0_request.request import FinishReason
from phase6_integration.api.conversation import conversation, text_of
from phase6_integration.api.errors import unservable
from phase6_integration.api.formatter import Formatter
from phase6_integration.api.logprobs import for_chat
from phase6_integration.api.parsing import (
    check_lengths,
    check_options,
    engine_request,
    output_lengths,
    prompt_alternatives,
    requested_length,
    truncate,
)
from phase6_integration.api.schemas import ChatRequest
from phase6_integration.api.state import AnswerPlan, Server, ServerState, json_body
from phase6_integration.api.streaming import GenerationResponse
from phase6_integration.api.tokenization import TokenizerPool
from phase6_integration.process.outputs import Chunk

router = APIRouter(tags=["model"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)  # of clients with a base URL without /v1
async def create_chat_completion(
    body: Annotated[ChatRequest, json_body(ChatRequest)], request: Request, server: Server
) -> Response:
    """A conversation, continued by the assistant."""
    return await continue_chat(body, request, server, ChatFormatter)


async def continue_chat(
    body: ChatRequest, request: Request, server: ServerState, make: "Callable[..., ChatFormatter]"
) -> GenerationResponse:
    """The answer to a conversation, for every API that has them. `make` is called as ChatFormatter is."""
    check_options(server, body, 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise unservable("top_logprobs", "top_logprobs need logprobs; set logprobs to true")
    content = server.grammars.of(body)
    context, pool = server.engine.max_model_len, server.tokenizers
    clip = server.settings.clip_max_tokens
    length = requested_length(body, context, clip)
    if whole := body.truncate_prompt_tokens is None:
        check_lengths(["".join(map(text_of, body.messages))], pool.tokenizer.longest, context, "messages")
    tenant = request.state.tenant
    arguments = conversation(body, reasoning_effort=body.reasoning_effort)
    prompt = await pool.chat(arguments, tenant, body.add_special_tokens is True, fits=whole)
    prompt = truncate(prompt, body, length or 1, context)
    default = server.settings.sampling_defaults.get("max_tokens")
    lengths = output_lengths([prompt], length, default, context, clip, "messages")
    plan = server.plan(server, body, prompt, content)
    formatter = make(server, body, request.state.request_id, prompt, plan)
    message = await engine_request(
        server,
        tenant,
        body,
        formatter.id,
        [prompt],
        lengths,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=prompt_alternatives(body, [prompt], None),
        grammar=plan.grammar and plan.grammar.text,
        prediction=await predicted(body, pool, tenant, context),
        **plan.sampling,
    )
    return GenerationResponse(server, message, formatter, body)


async def predicted(body: ChatRequest, pool: TokenizerPool, tenant: str, context: int) -> tuple[int, ...]:
    """The tokens that the client expects, as many as an answer can have."""
    text = "" if body.prediction is None else text_of(body.prediction)
    if not text:
        return ()
    check_lengths([text], pool.tokenizer.longest, context, "prediction")
    (tokens,) = await pool.encode([text], tenant, add_special_tokens=False)
    return tokens[:context]


class ChatFormatter(Formatter):
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, server: ServerState, body: ChatRequest, request_id: str, prompt: tuple[int, ...], plan: AnswerPlan
    ) -> None:
        super().__init__(server, body, request_id, [prompt])
        self.logprobs = bool(body.logprobs)
        if plan.grammar is not None:
            self.notes = plan.grammar.notes
        names = self.grammar_fields if plan.grammar_fields is None else plan.grammar_fields
        self.grammar_fields = tuple(self.own_fields.get(name.split(".")[0], name) for name in names)
        if body.return_token_ids:
            self.first_event["prompt_token_ids"] = prompt
        self._has_prediction = body.prediction is not None
        self._answers = {} if plan.reader is None else {index: plan.reader() for index in range(self.n)}
        self._called = plan.finish_reason

    def fields(self) -> dict[str, Any]:
        return self.about_prompt(0)

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        found = self._take(index)
        for call in found.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": new.text or (None if found else ""), **found}
        ids = new.token_ids if self.returns_ids else None
        return {"index": index, "message": message, **self._rest(index, new), "token_ids": ids}

    def delta(self, index: int, new: Chunk) -> dict[str, Any]:
        delta = ({"content": new.text} if new.text else {}) | self._take(index)
        ids = {"token_ids": new.token_ids} if self.returns_ids else {}
        return {"index": index, "delta": delta, **self._rest(index, new), **ids}

    def accumulate(self, chunk: Chunk) -> Chunk:
        """As in Formatter; the text of a chunk becomes its content."""
        if (answer := self._answers.get(chunk.index)) is not None:
            chunk.text = answer.push(chunk.text, chunk.finish_reason is not None)
        return super().accumulate(chunk)

    def has_news(self, new: Chunk) -> bool:
        answer = self._answers.get(new.index)
        return super().has_news(new) or (answer is not None and answer.has_news)

    def _usage(self, completion: int) -> dict[str, Any]:
        """As in Formatter; with a prediction, what became of its tokens."""
        usage = super()._usage(completion)
        if self._has_prediction:
            accepted = sum(output.accepted_drafts for output in self.outputs)
            rejected = sum(output.rejected_drafts for output in self.outputs)
            counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            usage["completion_tokens_details"] = counts
        return usage

    def _take(self, index: int) -> dict[str, Any]:
        answer = self._answers.get(index)
        return {} if answer is None else answer.take()

    def _rest(self, index: int, new: Chunk) -> dict[str, Any]:
        entries = for_chat(self.names, new.tokens, new.logprobs or ()) if self.logprobs else None
        answer, stopped = self._answers.get(index), new.finish_reason is FinishReason.STOP
        return {
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": self._called if stopped and answer and answer.calls else new.finish_reason,
            "stop_reason": self.outputs[index].stop_reason if stopped else None,
        }
