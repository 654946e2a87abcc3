"""Tokenizer: text to token ids and back, with the model's vocabulary, chat template and end-of-sequence tokens.

`tokenizers` splits the text and `transformers` renders the chat template in a sandbox. This module adds the bytes of a
single token, which streaming needs: a character may be spread over several tokens.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from phase0_request import model_files

BUNDLED = Path(__file__).parent / "tiny_chat"

Messages = Sequence[Mapping[str, Any]]
DecoderConfig = dict[str, Any] | None  # the "decoder" of a tokenizer.json

_WORD_START = "\u2581"  # SentencePiece's mark for a space in front of a word


class Tokenizer:
    """The tokenizer of one model. Immutable apart from a cache of token bytes; safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._decoder: DecoderConfig = json.loads(backend.to_str()).get("decoder")
        self._bytes = {i: b"" if token.special else token.content.encode() for i, token in added.items()}
        self._spelled = _spelled(
            backend, [token.content for token in added.values() if token.special and token.content]
        )
        self._named_tokens = dict(named_tokens or {})  # bos_token, eos_token, ... for the chat template
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.longest = max(map(len, vocabulary), default=0)  # characters of the longest token
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        bytes_of_token("", self._decoder)  # raises now, not at the first token, if the decoder is not supported

    @classmethod
    def from_pretrained(cls, directory: str | Path = BUNDLED) -> "Tokenizer":
        """Load from a model directory in Hugging Face layout; the default is the bundled tiny_chat."""
        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"no tokenizer.json in {str(directory)!r}; a model directory is needed that has one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(directory) writes it for older formats)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file} holds no tokenizer that can be read: {error}") from error
        ends, template = model_files.eos_ids(directory, backend.token_to_id), model_files.chat_template(directory)
        try:
            return cls(backend, ends, template, model_files.named_tokens(directory))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. With special tokens: also those that the model puts around it, such as a BOS token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half of a surrogate pair at character {error.start}; it is no text"
            ) from None
        # The batch call releases the GIL, even for one text, and computes no offsets.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def name(self, token: int) -> str | None:
        """The vocabulary's entry for a token, such as "<|im_end|>"; None if there is none."""
        return self._backend.id_to_token(token)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of a complete sequence of tokens. Special tokens are skipped; invalid UTF-8 becomes U+FFFD.

        Equal to the library's decoder with one exception: where a run of byte tokens holds an invalid byte,
        SentencePiece decoders replace the whole run; here, as in a stream, only the invalid bytes are replaced.
        """
        text = b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")
        return text.removeprefix(" ") if drops_leading_space(self._decoder) else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes a part of a character, nothing for a special token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, rendered by the model's chat template.

        A message that contains the text `<|im_end|>` is tokenized as those ten characters: only the template can begin
        or end a turn. So each special token's name in a message is replaced by a placeholder character, the template is
        rendered, and the placeholders become the plain-text tokens of the name.
        """
        marks = self._marks(messages)
        for special, mark in marks.items():
            messages = [_replace(message, special, mark) for message in messages]
        rendered = self.render_chat(messages, add_generation_prompt)
        spelled = {mark: self._spelled[special] for special, mark in marks.items()}
        pieces = re.split(f"([{''.join(spelled)}])", rendered) if marks else [rendered]
        return [token for piece in pieces for token in spelled.get(piece) or self.encode(piece, False)]

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Render the chat template as text. ValueError if the model has none or the template rejects the messages."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; send it a plain prompt")
        if not messages:
            raise ValueError("messages must hold at least one message, got none")
        # Imported here because it takes half a second and a plain prompt does not need it.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            names: dict[str, Any] = dict(self._named_tokens)
            rendered = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except Exception as error:  # a template is a program of the model and can raise anything
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return str(rendered[0][0])

    def _marks(self, messages: Messages) -> dict[str, str]:
        """A placeholder character for each special token whose name occurs in the messages."""
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
    """The plain-text tokens of each special token's name."""
    backend.encode_special_tokens = True
    try:
        return {special: list(backend.encode(special, add_special_tokens=False).ids) for special in specials}
    finally:
        backend.encode_special_tokens = False


def _replace(message: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name: value.replace(old, new) if isinstance(value, str) else value for name, value in message.items()}


@cache
def byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes map to themselves, the others to U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


def bytes_of_token(piece: str, decoder: DecoderConfig) -> bytes:
    """The bytes of one vocabulary entry. ValueError if the tokenizer's decoder is not supported."""
    kinds = {step["type"] for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        letters = byte_of_letter()
        return bytes(letters[c] for c in piece) if all(c in letters for c in piece) else piece.encode()
    if kinds & {"ByteFallback", "Metaspace"}:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">") and "ByteFallback" in kinds:
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_WORD_START, " ").encode()
    raise ValueError(
        f"this tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}; supported are ByteLevel "
        "(GPT-2, Llama 3, Qwen) and ByteFallback or Metaspace (Llama 2, Mistral)"
    )


def drops_leading_space(decoder: DecoderConfig) -> bool:
    """Whether decoding a complete text removes the space that SentencePiece put in front of it."""
    return any(
        (step["type"] == "Strip" and step.get("start")) or (step["type"] == "Metaspace" and _prepends(step))
        for step in _steps(decoder)
    )


def _prepends(step: dict[str, Any]) -> bool:
    return bool(step.get("prepend_scheme", "always") != "never")


def _steps(decoder: DecoderConfig) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
