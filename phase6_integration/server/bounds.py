"""Bounds: what the model and the settings allow, made part of the types of the requests.

Each server has request models of its own, narrowed from those of `protocol.py`. So a token id outside the vocabulary is
refused where the type is checked, before anything is copied, and /openapi.json says the same. What may be millions long
fails fast: with the first that is wrong in it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Discriminator, Field, RootModel, Tag, create_model
from pydantic_core import PydanticCustomError

from phase0_request.params import MAX_LOGPROBS, MAX_STOP_TOKENS, MAX_TOKENS
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.server.errors import VOCABULARY
from phase6_integration.server.protocol import (
    MAX_PARTS,
    Biases,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Model,
    Name,
    TokenizeChat,
    TokenizeText,
    bounded,
)
from phase6_integration.server.settings import ServerSettings

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Bounds:
    names: tuple[str, ...]  # of the model
    vocabulary: int  # token ids run from 0 to one less
    length: int  # tokens of a prompt and its answer
    choices: int  # n x prompts
    messages: int
    logprobs: int

    @classmethod
    def of(cls, engine: AsyncEngine, settings: ServerSettings) -> "Bounds":
        return cls(
            names=settings.served_model_names,
            vocabulary=engine.config.vocab_size,
            length=engine.max_model_len,
            choices=settings.max_choices,
            messages=settings.max_messages,
            logprobs=min(settings.max_logprobs, MAX_LOGPROBS),
        )

    @property
    def completion(self) -> type[CompletionRequest]:
        most = bounded(0, self.logprobs)
        return _narrow(
            CompletionRequest,
            **self._sampled,
            prompt=(self._prompt, ...),
            max_tokens=(int | None, bounded(0, self.length)),
            logprobs=(int | None, most),
        )

    @property
    def chat(self) -> type[ChatRequest]:
        length = (int | None, bounded(1, self.length))
        return _narrow(
            ChatRequest,
            **self._sampled,
            messages=(self._messages, ...),
            max_tokens=length,
            max_completion_tokens=length,
            top_logprobs=(int | None, bounded(0, self.logprobs)),
        )

    @property
    def tokenize(self) -> type[RootModel[TokenizeText | TokenizeChat]]:
        text = _narrow(TokenizeText, model=self._model)
        chat = _narrow(TokenizeChat, model=self._model, messages=(self._messages, ...))
        either: Any = Annotated[text, Tag("=text")] | Annotated[chat, Tag("=chat")]
        root = RootModel[Annotated[either, Discriminator(_kind_of_tokenize)]]
        return create_model("TokenizeRequest", __base__=root, __doc__="A text, or a conversation.")

    @property
    def detokenize(self) -> type[DetokenizeRequest]:
        tokens = Annotated[list[self._token], Field(max_length=MAX_TOKENS, fail_fast=True)]  # type: ignore[name-defined]
        return _narrow(DetokenizeRequest, model=self._model, tokens=(tokens, ...))

    @property
    def named(self) -> dict[str, Any]:
        """A model's name in a schema. Another name is not a bad value, but a model that is not found."""
        return {"enum": list(self.names)}

    @property
    def _model(self) -> Any:
        return Annotated[Name, Field(json_schema_extra=self.named)] | None, None

    @property
    def _token(self) -> Any:
        return Annotated[int, Field(ge=0, lt=self.vocabulary)]

    @property
    def _messages(self) -> Any:
        several = Field(min_length=1, max_length=self.messages, fail_fast=True)
        return Annotated[list[Message], several, AfterValidator(_few_parts)]

    @property
    def _sampled(self) -> dict[str, Any]:
        stops = Annotated[list[self._token], Field(max_length=MAX_STOP_TOKENS)]  # type: ignore[name-defined]
        return {
            "model": self._model,
            "n": (int | None, bounded(1, self.choices)),
            "min_tokens": (int | None, bounded(0, self.length)),
            "stop_token_ids": (stops | None, None),
            "logit_bias": (Annotated[Biases, AfterValidator(self._known)] | None, None),
        }

    def _known(self, biases: dict[str, float]) -> dict[str, float]:
        """The one bound that the schema does not say: names of an object have patterns, but no maximum."""
        if any(int(token) >= self.vocabulary for token in biases):
            raise PydanticCustomError(VOCABULARY, f"token ids of this model run from 0 to {self.vocabulary - 1}")
        return biases

    @property
    def _prompt(self) -> Any:
        """One text or several, one list of token ids or several."""
        text = Annotated[str, Field(min_length=1)]
        many = Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)
        tokens = Annotated[list[self._token], many]  # type: ignore[name-defined]
        several = Field(min_length=1, max_length=self.choices, fail_fast=True)
        return Annotated[
            Annotated[text, Tag("=text")]
            | Annotated[list[text], several, Tag("=texts")]
            | Annotated[tokens, Tag("=tokens")]
            | Annotated[list[tokens], several, Tag("=token_lists")],
            Discriminator(
                _kind_of_prompt,
                custom_error_type="prompt",
                custom_error_message="a prompt is a string, a list of strings, a list of token ids or a list of such",
            ),
        ]


def _narrow(base: type[M], **fields: Any) -> type[M]:
    """The same model, by the same name, with some of its fields bounded more closely."""
    return create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


def _few_parts(messages: list[Message]) -> list[Message]:
    if sum(len(message.content) for message in messages if isinstance(message.content, list)) > MAX_PARTS:
        raise PydanticCustomError("too_many_parts", f"the messages may have at most {MAX_PARTS} text parts together")
    return messages


def _kind_of_tokenize(value: Any) -> str:
    return "=chat" if isinstance(value, dict) and "messages" in value else "=text"


def _kind_of_prompt(value: Any) -> str | None:
    """Which of its forms a prompt has: told by its first element, so that an error is about that form alone."""
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "=token_lists" if isinstance(first, list) else "=texts" if isinstance(first, str) else "=tokens"
