"""The fields that change what is drawn: penalties, biases, allowed tokens, bad words, min_tokens; and a prediction."""

from collections.abc import Sequence

from fastapi import FastAPI

from phase0_request.params import MAX_BAD_WORD
from phase6_integration.api.additions import Addition, Asked, Json, Prepare
from phase6_integration.api.conversation import text_of
from phase6_integration.api.errors import unservable
from phase6_integration.api.parsing import check_characters
from phase6_integration.api.schemas import SamplingFields as CoreFields
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields.request_fields import ChatRequest, SamplingFields
from phase6_integration.extras.fields.token_details import details_of

SAME = "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids"  # in SamplingParams


class DrawnFields:
    """The feature."""

    def __init__(self, server: ServerState) -> None:
        self._server, self._pool = server, server.tokenizers

    def __call__(self, body: CoreFields) -> Prepare | None:
        if not isinstance(body, SamplingFields):
            return None
        if body.best_of not in (None, n := body.n or 1):
            raise unservable("best_of", f"best_of can only be as n, which is {n}, got {body.best_of}")
        return self._prepare

    async def _prepare(self, asked: Asked) -> None:
        body, params = asked.body, asked.params
        assert isinstance(body, SamplingFields)
        params |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
        if body.logit_bias:
            params["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        if isinstance(body, ChatRequest):
            await self._predict(asked, body)
        params["bad_words"] = await self._bad_words(body, asked.client)
        params["min_tokens"] = min_tokens(body, min(asked.lengths), params.get("grammar") is not None)
        if excluding := excluding_fields(body):
            asked.additions.append(Excluding(excluding))

    async def _predict(self, asked: Asked, body: ChatRequest) -> None:
        """The tokens that the client expects, at most as many as an answer can have."""
        if body.prediction is None:
            return
        asked.additions.append(Predicted())
        text = text_of(body.prediction.content)
        if text:
            check_characters(self._server, [text], "prediction")
            (tokens,) = await self._pool.encode([text], asked.client, add_special_tokens=False)
            asked.params["prediction"] = tokens[: self._server.engine.max_model_len]

    async def _bad_words(self, body: SamplingFields, client: str) -> list[tuple[int, ...]]:
        """The tokens of each word in two forms: at the start of a text, and after a space."""
        texts: list[str] = []
        for word in body.bad_words or ():
            bare = word.lstrip(" ")
            texts += (bare, f" {bare}") if bare else (word,)
        if not texts:
            return []
        found = dict.fromkeys(await self._pool.encode(texts, client, add_special_tokens=False))
        if not all(1 <= len(tokens) <= MAX_BAD_WORD for tokens in found):
            raise unservable("bad_words", f"each of bad_words must be 1 to {MAX_BAD_WORD} tokens of this model")
        return list(found)


def min_tokens(body: SamplingFields, length: int, has_grammar: bool) -> int:
    """The field, which must fit the shortest answer."""
    if body.min_tokens and has_grammar:
        raise unservable("min_tokens", "min_tokens: with a grammar or required calls, an answer ends when complete")
    if body.min_tokens and body.min_tokens > max(length, 1):
        message = f"min_tokens must be at most the {length} tokens of the answer, got {body.min_tokens}"
        raise unservable("min_tokens", message)
    return body.min_tokens or 0


def excluding_fields(body: SamplingFields) -> list[str]:
    """The request's fields that exclude tokens from its answer, other than its grammar's."""
    found = [name for name in ("allowed_token_ids", "bad_words") if getattr(body, name)]
    if body.min_tokens:
        found += ["min_tokens", *(["stop_token_ids"] if body.stop_token_ids else [])]
    return found


class Excluding(Addition):
    """Names the fields that exclude tokens, if no token is left."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.excluding = fields


class Predicted(Addition):
    """Reports how a prediction did."""

    def usage(self, usage: Json) -> None:
        details = [details_of(output) for output in self.outputs]
        counts = {
            "accepted_prediction_tokens": sum(one.accepted for one in details),
            "rejected_prediction_tokens": sum(one.rejected for one in details),
        }
        usage["completion_tokens_details"] = counts


def attach(app: FastAPI) -> None:
    """Attach after the extras that make grammars, with which some fields cannot be combined."""
    server: ServerState = app.state.server
    server.features.append(DrawnFields(server))
