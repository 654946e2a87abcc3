"""POST /v1/chat/completions: a conversation, continued by the assistant."""

from typing import Any

from fastapi import Request

from phase6_integration.server.asking import answer_length, asks, check_lengths, check_samples, room
from phase6_integration.server.errors import conflict
from phase6_integration.server.exchange import Exchange
from phase6_integration.server.front import Front
from phase6_integration.server.logprobs import for_chat
from phase6_integration.server.protocol import ChatRequest
from phase6_integration.server.shape import Part, Shape


async def chat(front: Front, body: ChatRequest, request: Request) -> Exchange:
    """All that can be checked is checked before anything is rendered; the engine is asked last."""
    front.model_name(body.model)
    check_samples(body, 1, front.settings.max_choices)
    if body.top_logprobs is not None and not body.logprobs:
        raise conflict("top_logprobs", "top_logprobs are told only with logprobs; set logprobs to true")
    length = answer_length(body)
    context = front.engine.max_model_len
    said = "".join(message.text for message in body.messages)
    check_lengths([said], front.texts.tokenizer.longest, context, "messages")
    tokens = await front.texts.chat(body.messages, body.add_generation_prompt is not False)
    rooms = room([tokens], length, None, context, "messages")
    call = front.call("chatcmpl", body, request, [tokens])
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    shape = ChatShape(call, front.names, bool(body.logprobs))
    return front.exchange(body, asks(body, call.id, [tokens], rooms, logprobs), shape)


class ChatShape(Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            for index in range(self.call.n)
        ]

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text}
        return {"index": index, "message": message, **self._rest(index, part)}

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        delta = {"content": part.text} if part.text else {}
        return {"index": index, "delta": delta, **self._rest(index, part)}

    def _rest(self, index: int, part: Part) -> dict[str, Any]:
        entries = for_chat(self.names, part.tokens, part.logprobs) if self.logprobs else None
        stop = self.answers[index].stop_reason if part.finish_reason == "stop" else None
        return {
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": part.finish_reason,
            "stop_reason": stop,
        }
