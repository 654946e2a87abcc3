"""The fields that ask about tokens: logprobs, prompt_logprobs, return_token_ids, and the echo of a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer
from phase6_integration.api.additions import Addition, Asked, Json, Prepare
from phase6_integration.api.errors import unservable
from phase6_integration.api.schemas import SamplingFields as CoreFields
from phase6_integration.api.state import ServerState
from phase6_integration.extras.fields.field_settings import FieldSettings
from phase6_integration.extras.fields.logprobs import TokenNames, for_chat, for_completion, for_prompt, prompt_offsets
from phase6_integration.extras.fields.request_fields import ChatRequest, CompletionRequest, SamplingFields
from phase6_integration.extras.fields.token_details import LogprobArrays, TokenDetails, details_of
from phase6_integration.process.outputs import Chunk

MAX_SCORES = 1 << 20  # logprobs of the prompts of a request, alternatives included


class Echo(NamedTuple):
    """A prompt, as it is repeated at the start of the output."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]


class ToldFields:
    """The feature."""

    def __init__(self, server: ServerState, names: TokenNames) -> None:
        self._server, self._names = server, names
        self._most = server.settings.of(FieldSettings).max_logprobs

    def __call__(self, body: CoreFields) -> Prepare | None:
        if not isinstance(body, ChatRequest | CompletionRequest):
            return None
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            asked = getattr(body, name, None)
            if type(asked) is int and asked > self._most:
                raise unservable(name, f"{name} may be at most {self._most} on this server, got {asked}")
        if body.prompt_logprobs is not None and body.stream:
            raise unservable("prompt_logprobs", "a stream has no prompt_logprobs; set stream to false")
        if isinstance(body, ChatRequest):
            if body.top_logprobs is not None and not body.logprobs:
                raise unservable("top_logprobs", "top_logprobs need logprobs; set logprobs to true")
            return self._for_chat
        if body.max_tokens == 0 and not body.echo:
            raise unservable("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to answer")
        return self._for_completion

    async def _for_chat(self, asked: Asked) -> None:
        body = asked.body
        assert isinstance(body, ChatRequest)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        asked.params |= {"logprobs": logprobs, "prompt_logprobs": prompt_alternatives(body, asked.prompts, None)}
        asked.additions.append(ChatTokens(self._names, asked, body, logprobs))
        if body.return_token_ids:
            asked.first_event["prompt_token_ids"] = asked.prompts[0]

    async def _for_completion(self, asked: Asked) -> None:
        body = asked.body
        assert isinstance(body, CompletionRequest)
        scores = prompt_alternatives(body, asked.prompts, body.logprobs if body.echo else None)
        asked.params |= {"logprobs": body.logprobs, "prompt_logprobs": scores}
        echoes = [await self._echo(asked, number) for number in range(len(asked.prompts))] if body.echo else None
        asked.additions.append(CompletionTokens(self._names, asked, body, body.logprobs, echoes))

    async def _echo(self, asked: Asked, number: int) -> Echo:
        pool, tokens, text = self._server.tokenizers, asked.prompts[number], asked.texts.get(number)
        if text is None:
            text = await pool.decode(tokens, asked.body.skip_special_tokens is not False)
        tokenizer: Tokenizer = pool.tokenizer
        return Echo(text, tokens, prompt_offsets(tokenizer, tokens, text))


def prompt_alternatives(body: SamplingFields, prompts: Sequence[Sequence[int]], echoed: int | None) -> int | None:
    """The number of alternatives that the engine finds for prompt tokens: the most that `prompt_logprobs` and an
    echo with logprobs need. All exist after one step, so without a limit a small request could cause a huge
    response."""
    asked = {"prompt_logprobs": body.prompt_logprobs, "logprobs": echoed}
    given = {name: number for name, number in asked.items() if number is not None}
    if not given:
        return None
    most = max(given.values())
    n, tokens = body.n or 1, sum(map(len, prompts))
    if n * tokens * (1 + most) > MAX_SCORES:
        message = f"a prompt may have {MAX_SCORES} logprobs, alternatives included, got {n} x {tokens} x {1 + most}"
        raise unservable(next(iter(given)), message)
    return most


class ToldTokens(Addition):
    """What an answer reports about its tokens, and about its prompts."""

    def __init__(self, names: TokenNames, asked: Asked, body: SamplingFields, logprobs: int | None) -> None:
        self.names, self.prompts, self.logprobs = names, asked.prompts, logprobs
        self.n, self.returns_ids = body.n or 1, bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs

    def details(self, index: int) -> TokenDetails:
        return details_of(self.outputs[index])

    def about_prompt(self, index: int) -> Json:
        """What the request asks to know about the prompt of a choice."""
        prompt, scores = self.prompts[index // self.n], None
        if self._prompt_logprobs is not None:
            found = self.details(index).prompt_logprobs or ()
            scores = for_prompt(self.names, prompt, found, self._prompt_logprobs)
        return {"prompt_logprobs": scores, "prompt_token_ids": iter(prompt) if self.returns_ids else None}

    def ids(self, new: Chunk, whole: bool) -> Json:
        if whole or self.returns_ids:
            return {"token_ids": new.token_ids if self.returns_ids else None}
        return {}


class ChatTokens(ToldTokens):
    def write(self, choice: Json, new: Chunk | None, whole: bool) -> None:
        scores = None
        if self.logprobs is not None and new is not None:
            scores = for_chat(self.names, new.tokens, self.details(choice["index"]).take(len(new.tokens)))
        end = choice.pop("finish_reason"), choice.pop("stop_reason")
        choice["logprobs"] = None if scores is None else {"content": scores}
        choice["finish_reason"], choice["stop_reason"] = end
        if new is not None:
            choice |= self.ids(new, whole)

    def fields(self) -> Json:
        return self.about_prompt(0)


class CompletionTokens(ToldTokens):
    def __init__(
        self,
        names: TokenNames,
        asked: Asked,
        body: CompletionRequest,
        logprobs: int | None,
        echoes: Sequence[Echo] | None,
    ) -> None:
        super().__init__(names, asked, body, logprobs)
        self._echo_only = body.max_tokens == 0  # the one token that the engine samples is not sent
        self._echoes = echoes
        self._unsent = set(range(len(asked.prompts) * self.n))  # choices of which nothing is sent, not even the prompt

    def write(self, choice: Json, new: Chunk | None, whole: bool) -> None:
        assert new is not None  # no event opens a completion
        index = choice["index"]
        reason, stop = choice.pop("finish_reason"), choice.pop("stop_reason")
        if self._echo_only:
            new, reason, stop = Chunk(index), reason and FinishReason.LENGTH, None
        first = index in self._unsent
        self._unsent.discard(index)
        prompt = self.about_prompt(index) if whole else {}
        logprobs = self._about(choice, new, first)
        choice |= {"logprobs": logprobs, "finish_reason": reason, "stop_reason": stop, **prompt, **self.ids(new, whole)}
        if first and self.returns_ids and not whole:
            choice["prompt_token_ids"] = self.prompts[index // self.n]

    def _about(self, choice: Json, new: Chunk, first: bool) -> Json | None:
        """Writes the text, with the prompt if it is repeated. Returns the logprobs of its tokens."""
        index, text, tokens, offsets = choice["index"], new.text, [*new.tokens], [*new.offsets]
        found = self.details(index).take(len(new.tokens)) if self.logprobs is not None else LogprobArrays()
        if self._echoes is not None:
            echo = self._echoes[index // self.n]
            offsets = [offset + len(echo.text) for offset in offsets]
            if first:
                text = echo.text + text
                tokens, offsets = [*echo.tokens, *tokens], [*echo.offsets, *offsets]
                details, new_ones = self.details(index), found
                found = LogprobArrays([None])
                for part in (details.prompt_logprobs, new_ones):
                    found.extend(part or LogprobArrays())
                details.prompt_logprobs = None  # written once
        choice["text"] = text
        return None if self.logprobs is None else for_completion(self.names, tokens, found, offsets, self.logprobs)

    def usage(self, usage: Json) -> None:
        if self._echo_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
