"""Tokenizer: text to token ids and back, with the model's vocabulary, chat template and end-of-sequence tokens.

`tokenizers` splits the text and `ChatTemplate` renders conversations. This module adds the bytes of a single token,
which streaming needs since a character may span several tokens, and keeps control tokens apart from text.

The vocabulary of a model may be padded: its embedding has more rows than its tokenizer has tokens. Such an id, and a
hole among the ids of the tokenizer, decodes to no text, everywhere. A prompt may contain it; the sampler never draws it
unless a request asks for it by logit_bias.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from phase0_request.chat_template import ChatTemplate, Messages
from phase0_request.connect import has_tokenizer, is_single_file, tokenizer_in
from phase0_request.support.model_files import naming, panics_raised, read_tokenizer
from phase0_request.token_bytes import bytes_of, drops_leading_space, steps_of

BUNDLED = Path(__file__).parent / "tiny_chat"

_WORD = re.compile(r"[\w-]*")


class TooLongError(ValueError):
    """The text is longer than the caller allows."""


class Tokenizer:
    """The tokenizer of one model. Immutable apart from a cache of token bytes; safe to share between threads."""

    def __init__(
        self,
        backend: HFTokenizer,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        backend.no_padding()  # a file may ask for both; transformers drops them in each call
        backend.no_truncation()
        self._backend = backend
        described = json.loads(backend.to_str())
        self._decoder = list(steps_of(described.get("decoder")))
        self._special = {i: bytes_of(token.content, self._decoder) for i, token in added.items() if token.special}
        self._bytes = {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self._added = {token.content: i for i, token in added.items()}
        self._control = {token.content: i for i, token in added.items() if token.special and token.content}
        unknown = described["model"].get("unk_token")  # stands for a character of any text
        self._control_ids = frozenset(i for name, i in self._control.items() if name != unknown)
        self._named_tokens = named_tokens or {}
        self._template = ChatTemplate(chat_template, self._control, self._named_tokens) if chat_template else None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.longest = max(map(len, vocabulary), default=0)  # characters of the longest token
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        bytes_of("", self._decoder)  # raises now, not at the first token, if the decoder is not supported

    @classmethod
    def from_pretrained(cls, directory: str | Path = BUNDLED) -> "Tokenizer":
        """Load from a model directory in Hugging Face layout or from a model in one file; the default is the bundled
        tiny_chat."""
        directory = Path(directory)
        source = tokenizer_in(directory) if is_single_file(directory) else read_tokenizer(directory)
        with naming(source.file):
            return cls(source.backend, source.eos_ids, source.chat_template, source.named_tokens)

    @staticmethod
    def is_in(directory: str | Path) -> bool:
        """Whether a model has a tokenizer. Without one, prompts and outputs are token ids."""
        directory = Path(directory)
        return has_tokenizer(directory) if is_single_file(directory) else (directory / "tokenizer.json").is_file()

    def with_chat_template(self, source: str) -> "Tokenizer":
        """The same tokenizer with another chat template."""
        made = copy(self)
        made.chat_template, made._template = source, ChatTemplate(source, self._control, self._named_tokens)
        return made

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. With special tokens: also those that the model puts around it, such as a BOS token.

        The name of a control token in the text becomes that token, as in transformers: a completion's prompt may use
        the model's own format. `chat` does otherwise.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The tokens of each text, as `encode` finds them. Other threads run meanwhile."""
        return _encode(self._backend, texts, add_special_tokens)

    @cached_property
    def _plain(self) -> HFTokenizer:
        """A copy of the backend, to which the name of a control token is text like any other. A switch of one backend
        would stop the threads that encode in the other way."""
        plain = HFTokenizer.from_str(self.to_json())
        plain.encode_special_tokens = True
        return plain

    def to_json(self) -> str:
        """The contents of a tokenizer.json."""
        return str(self._backend.to_str())

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens, as the tokenizer's file writes them, and their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    def wrap(self, tokens: Sequence[int]) -> list[int]:
        """Add the tokens that the model puts around a text, such as a BOS token."""
        text, around = self.encode("a", add_special_tokens=False), self.encode("a")
        start = next((i for i in range(len(around)) if around[i : i + len(text)] == text), None)
        if start is None:
            raise ValueError("the tokenizer encodes a text otherwise when it puts tokens around it")
        return [*around[:start], *tokens, *around[start + len(text) :]]

    def name(self, token: int) -> str | None:
        """The vocabulary's entry for a token, such as "<|im_end|>"; None if there is none."""
        return self._backend.id_to_token(token)

    def marker(self, text: str) -> int | None:
        """The token that was added to the vocabulary for this text, such as "<tool_call>"; None if there is none. It is
        looked up: a tokenizer may take minutes to encode ten characters."""
        return self._added.get(text)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a complete sequence of tokens. Special tokens are skipped, or written out; invalid UTF-8 becomes
        U+FFFD.

        Equal to the library's decoder with one exception: where a run of byte tokens holds an invalid byte,
        SentencePiece decoders replace the whole run; here, as in a stream, only the invalid bytes are replaced.
        """
        text = b"".join(self.token_bytes(token, skip_special_tokens) for token in tokens).decode("utf-8", "replace")
        return text.removeprefix(" ") if drops_leading_space(self._decoder) else text

    def token_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes of one token: often a word, sometimes a part of a character, nothing for an id that the tokenizer
        does not know. A special token is skipped, or written as its name, such as "<|im_end|>"."""
        if not skip_special_tokens and token in self._special:
            return self._special[token]
        if token not in self._bytes:
            if token < 0:
                raise ValueError(f"a token id is an integer from 0, got {token}")
            entry = self._backend.id_to_token(token) if token < self.vocab_size else None
            self._bytes[token] = b"" if entry is None else bytes_of(entry, self._decoder)
        return self._bytes[token]

    def label(self, token: int) -> str:
        """The text of one token by itself; a special token's name; U+FFFD for a part of a character."""
        return self.token_bytes(token, skip_special_tokens=False).decode("utf-8", "replace")

    def chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        max_chars: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, rendered by the model's chat template with these `variables`, such as `tools`.
        ValueError if the model has none or if the template rejects the messages, TooLongError if the rendered text is
        longer than `max_chars`.

        Its control tokens are the ones that the template wrote, in order: `<|im_end|>` in a message, in the result
        of a tool or in its description is ten characters of text. For all other conversations transformers gives the
        same result.
        """
        parts = self.render(messages, add_generation_prompt, variables)
        text, written = "".join(parts), self._written(parts)
        if max_chars is not None and len(text) > max_chars:
            raise TooLongError(f"the rendered conversation has {len(text)} characters; at most {max_chars} fit")
        tokens = self.encode(text, add_special_tokens=False)
        if self._control_in(tokens) == written:
            return tokens
        try:
            neutral_messages, neutral_variables = self._neutral(messages), self._neutral(variables or {})
        except RecursionError:
            raise ValueError("a message is nested too deeply") from None
        neutral = self.render(neutral_messages, add_generation_prompt, neutral_variables)
        control = self._control_in(self.encode("".join(neutral), add_special_tokens=False))
        if control == self._control_in(tokens):
            return tokens  # the template spells names out of parts, such as '<|' + role + '|>'; the messages add none
        tokens = self._encode_parts(parts)
        if control != self._written(neutral) or self._control_in(tokens) != written:
            raise ValueError("a message contains the name of a control token, which this chat template cannot escape")
        return tokens

    def render(
        self, messages: Messages, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None
    ) -> list[str]:
        """The rendered chat template, split at its control tokens, which are every second part. ValueError if the model
        has none or the template rejects the messages."""
        if self._template is None:
            raise ValueError("this model has no chat template; send it a plain prompt")
        return self._template.render(messages, add_generation_prompt, variables)

    def spells(self, words: set[str], parts: Sequence[str]) -> bool:
        """Whether a rendered conversation contains a control token with one of these words in its name."""
        tokens = {token for name, token in self._control.items() if any(word in name for word in words)}
        tokens &= self._control_ids
        return bool(tokens) and not tokens.isdisjoint(self.encode("\0".join(parts[::2]), add_special_tokens=False))

    def _neutral(self, value: Any) -> Any:
        """The same structure, with "x" for every text that is not a plain word, so none spells a control token."""
        if isinstance(value, Mapping):
            return {self._neutral(key): self._neutral(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._neutral(item) for item in value]
        if not isinstance(value, str):
            return value
        is_plain_word = _WORD.fullmatch(value) and not self._control_in(self.encode(value, False))
        return value if is_plain_word else "x"

    def _written(self, parts: Sequence[str]) -> list[int]:
        """The control tokens that the template wrote."""
        return self._control_in(self._control[name] for name in parts[1::2])

    def _control_in(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if token in self._control_ids]

    def _encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Tokens of a rendered conversation in which a message spells a control token."""
        tokens, *others = _encode(self._plain, parts[::2], add_special_tokens=False)
        for name, text in zip(parts[1::2], others, strict=True):
            tokens += [self._control[name], *text]
        return tokens


def _encode(backend: HFTokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text holds half of a surrogate pair at character {error.start}; it is no text"
            raise ValueError(message) from None
    with panics_raised():
        try:  # unlike `encode`, the batch call releases the GIL, even for one text, and computes no offsets
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError("the tokenizer cannot encode this text") from error
        return [encoding.ids for encoding in encodings]
