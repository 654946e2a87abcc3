"""Tokenizer: text to token ids and back, with the model's own vocabulary, chat template and ways to end.

The work is done by the ecosystem's libraries: `tokenizers` splits text, `transformers` renders the chat template in
a sandbox. Added here is the view the rest of the engine takes: a token is a piece of bytes.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from phase0_request import model_files
from phase0_request.token_bytes import Decoder, bytes_of_token, drops_leading_space

BUNDLED = Path(__file__).parent / "tiny_chat"

Messages = Sequence[Mapping[str, Any]]


class Tokenizer:
    """One model's tokenizer. Nothing that can be seen of it changes once loaded; safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._decoder: Decoder = json.loads(backend.to_str()).get("decoder")
        self._bytes = {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self._spelled = _spelled(
            backend, [token.content for token in added.values() if token.special and token.content]
        )
        self._named_tokens = dict(named_tokens or {})  # what templates call bos_token, eos_token, ...
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.longest = max(map(len, vocabulary), default=0)  # characters that one token can stand for
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        bytes_of_token("", self._decoder)  # a decoder that is not understood is refused now, not at the first token

    @classmethod
    def from_pretrained(cls, directory: str | Path = BUNDLED) -> "Tokenizer":
        """Load from a model directory as Hugging Face lays it out; without one, the bundled tiny_chat."""
        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {str(directory)!r}; a model directory is needed that has one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(directory) writes it for older formats)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} holds no tokenizer that can be read: {error}") from error
        ends, template = model_files.eos_ids(directory, backend.token_to_id), model_files.chat_template(directory)
        try:
            return cls(backend, ends, template, model_files.named_tokens(directory))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. With special tokens: also what the model wants around it, such as a first token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half of a surrogate pair at character {error.start}; it is no text"
            ) from None
        # In a batch, even of one, the library lets other threads run meanwhile; and no offsets are worked out.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def name(self, token: int) -> str | None:
        """What the vocabulary calls a token: for a special one, what a text that spells it out would say."""
        return self._backend.id_to_token(token)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a whole sequence of tokens; special tokens have none. Bytes that are no UTF-8 become U+FFFD.

        The same text as the library's own decoder gives, with one difference: where a run of byte tokens holds a bad
        byte, SentencePiece decoders blank the whole run; here, as in a stream, the good characters of it stay.
        """
        text = b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if drops_leading_space(self._decoder) else text

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for: often a word, sometimes a part of a character, nothing for a special token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, laid out by the model's template, ready for the assistant to go on. Who writes
        `<|im_end|>` in a message has written ten characters: only the template ends a turn or begins one."""
        marks = self._marks(messages)
        for special, mark in marks.items():
            messages = [_replace(message, special, mark) for message in messages]
        rendered = self.render_chat(messages, add_generation_prompt)
        spelled = {mark: self._spelled[special] for special, mark in marks.items()}
        pieces = re.split(f"([{''.join(spelled)}])", rendered) if marks else [rendered]
        return [token for piece in pieces for token in spelled.get(piece) or self.encode(piece, False)]

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The same as text. ValueError if the model has no template, or the template refuses the messages."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; send it a plain prompt")
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        # Imported here: it takes half a second, and a plain prompt needs no template.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            names: dict[str, Any] = dict(self._named_tokens)
            rendered = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except Exception as error:  # a template is the model's own program, and fails in any way a program can
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return str(rendered[0][0])

    def _marks(self, messages: Messages) -> dict[str, str]:
        """For each special token that the messages spell out, a character which they do not have."""
        text = "\0".join(value for message in messages for value in message.values() if isinstance(value, str))
        marks = (mark for mark in map(chr, range(0xF0000, 0x10FFFE)) if mark not in text)
        found = [special for special in self._spelled if special in text]
        return dict(zip(sorted(found, key=len, reverse=True), marks, strict=False))

    def _find_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token ids of this model run from 0 to {self.vocab_size - 1}, got {token}")
        piece = self._backend.id_to_token(token)
        if piece is None:
            raise ValueError(f"token {token} is a hole in this model's vocabulary")
        return bytes_of_token(piece, self._decoder)


def _spelled(backend: Backend, specials: Iterable[str]) -> dict[str, list[int]]:
    """How each special token's name reads as plain text."""
    backend.encode_special_tokens = True
    try:
        return {special: list(backend.encode(special, add_special_tokens=False).ids) for special in specials}
    finally:
        backend.encode_special_tokens = False


def _replace(message: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name: value.replace(old, new) if isinstance(value, str) else value for name, value in message.items()}
