"""POST /tokenize and /detokenize: what the tokenizer makes of a text, and back."""

from fastapi import Response

from phase6_integration.server.front import Front
from phase6_integration.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from phase6_integration.server.shape import encode


async def tokenize(front: Front, body: TokenizeText | TokenizeChat) -> Response:
    front.model_name(body.model)
    if isinstance(body, TokenizeChat):
        tokens = await front.texts.chat(body.messages, body.add_generation_prompt is not False)
    else:
        (tokens,) = await front.texts.encode([body.prompt], body.add_special_tokens is not False)
    strings = [front.names[token].text for token in tokens] if body.return_token_strs else None
    return _json(
        {
            "count": len(tokens),
            "max_model_len": front.engine.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(front: Front, body: DetokenizeRequest) -> Response:
    front.model_name(body.model)
    return _json({"prompt": await front.texts.decode(body.tokens, "tokens")})


def _json(content: object) -> Response:
    return Response(encode(content), media_type="application/json")
