"""POST /tokenize and /detokenize: what the tokenizer makes of a text, and back."""

from collections.abc import Sequence

from fastapi import Response

from phase6_integration.server.front import Front
from phase6_integration.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from phase6_integration.server.shape import encode


async def tokenize(front: Front, body: TokenizeText | TokenizeChat) -> Response:
    front.model_name(body.model)
    texts = front.texts

    def answer(tokens: Sequence[int]) -> bytes:
        strings = [front.names[token].text for token in tokens] if body.return_token_strs else None
        context = front.engine.max_model_len
        return encode({"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings})

    if isinstance(body, TokenizeChat):
        laid_out = await texts.chat(body.messages, body.add_generation_prompt is not False)
        return _json(await texts.aside(lambda: answer(laid_out), len(laid_out)))
    prompt, specials = body.prompt, body.add_special_tokens is not False
    return _json(await texts.aside(lambda: answer(texts.split(prompt, specials)), len(prompt)))


async def detokenize(front: Front, body: DetokenizeRequest) -> Response:
    front.model_name(body.model)
    return _json(encode({"prompt": await front.texts.decode(body.tokens, "tokens")}))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
