"""POST /tokenize and /detokenize: what the tokenizer makes of a text, and back."""

from fastapi import Response

from phase6_integration.server.errors import bad_value
from phase6_integration.server.front import Front
from phase6_integration.server.protocol import DetokenizeRequest, TokenizeRequest
from phase6_integration.server.shape import encode


async def tokenize(front: Front, body: TokenizeRequest) -> Response:
    front.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("prompt", "give a prompt or messages, one of the two")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise bad_value("add_special_tokens", "the chat template decides on special tokens; leave this out")
        tokens = await front.texts.chat(body.messages, body.add_generation_prompt is not False)
    else:
        if body.add_generation_prompt is not None:
            raise bad_value("add_generation_prompt", "add_generation_prompt is for messages; leave it out")
        tokens = await front.texts.encode(body.prompt or "", "prompt", body.add_special_tokens is not False)
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
