"""SamplingParams: how to sample the output tokens of one request. Validated on creation, immutable afterwards."""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

from phase0_request.support.checks import check_bool, check_int, check_number, invalid

MAX_TOKENS = 1 << 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR = 1 << 20  # characters
GRAMMAR_REFUSED = "its grammar is refused"  # an error begins with this; what is wrong follows after a colon
GRAMMAR_FAILED = "its grammar cannot be followed any further"  # it is too complex for what the output has become
MAX_BAD_WORDS = 128
MAX_BAD_WORD = 256  # tokens
REPETITION_PENALTY = 0.01, 10.0  # logits are divided by it: those divided by 1e-45 are infinite
MAX_TOKEN_ID = (1 << 31) - 1  # token ids are stored as int32; the engine checks the model's own vocabulary size
MAX_SET_ID = (1 << 24) - 1  # beyond the largest vocabulary; a bitmap up to it is 2 MB
WORD_BYTES = 4  # bytes that the size is a multiple of, so that masks of 32-bit words can be made of it in place
# The fields that a sampler serves without processors, and those of the output's end and text.
OF_THE_CORE = {"temperature", "top_k", "top_p", "min_p", "seed", "prediction"}
OF_THE_CORE |= {"max_tokens", "stop", "stop_token_ids", "ignore_eos"}
OF_THE_CORE |= {"include_stop_str_in_output", "skip_special_tokens"}
_DIGITS = bytes.maketrans(b"\0\1", b"01")


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of token ids as a bitmap: token t is bit t % 8 of byte t // 8. All 152,000 ids of a large vocabulary take
    19 kB; as a tuple, 5 MB. Immutable: the n completions of a request share one."""

    bits: bytes

    @classmethod
    def of(cls, name: str, tokens: "TokenSet | Sequence[int]") -> "TokenSet":
        """Check these ids and return their set; errors use `name`. A set is returned unchanged."""
        if isinstance(tokens, TokenSet):
            return tokens
        allowed = f"a list of at least one token id from 0 to {MAX_SET_ID}"
        if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence) or not tokens:
            raise invalid(name, allowed, tokens)
        if {*map(type, tokens)} != {int} or min(tokens) < 0 or (highest := max(tokens)) > MAX_SET_ID:
            wrong = (token for token in tokens if type(token) is not int or not 0 <= token <= MAX_SET_ID)
            raise invalid(name, allowed, next(wrong))
        flags = bytearray(highest + 1)
        for token in tokens:
            flags[token] = 1
        bits = int(flags.translate(_DIGITS)[::-1], 2)
        return cls(bits.to_bytes(-(-len(flags) // (8 * WORD_BYTES)) * WORD_BYTES, "little"))

    @property
    def highest(self) -> int:
        """The highest id; -1 if the set is empty."""
        return int.from_bytes(self.bits, "little").bit_length() - 1


class TokenLogprobs(NamedTuple):
    """The log probability of one token, and the most likely tokens at its position. Natural logarithms."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. A wrong value raises a ValueError that names the field."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off; -1, the value for off in other servers, becomes 0
    min_p: float = 0.0
    stop: str | Sequence[str] = ()  # a single string becomes a tuple of one
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1: off
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # a mapping becomes its pairs
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    grammar: str | None = None  # of the output, for llguidance; completing it ends the output, even before min_tokens
    allowed_token_ids: TokenSet | Sequence[int] | None = None  # the only ones that may be drawn; ids become a set
    bad_words: Sequence[Sequence[int]] = ()  # sequences of token ids that are never completed
    prediction: Sequence[int] = ()  # what the output may be, for drafts: it changes no output, only the time
    include_stop_str_in_output: bool = False  # also a stop token's text
    skip_special_tokens: bool = True  # in the text; False: each by its name
    embed: bool = False  # give the final hidden state of the last prompt token too

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, low, high in (
            ("temperature", 0, 100),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("repetition_penalty", *REPETITION_PENALTY),
        ):
            check_number(name, getattr(self, name), low, high)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_int("top_k", self.top_k, -1, MAX_TOKEN_ID)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "embed"):
            check_bool(name, getattr(self, name))
        if self.grammar is not None and not (isinstance(self.grammar, str) and 1 <= len(self.grammar) <= MAX_GRAMMAR):
            raise invalid("grammar", f"a text of 1 to {MAX_GRAMMAR} characters", self.grammar)
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("prediction", _ids("prediction", self.prediction, MAX_TOKENS))
        words = _listed("bad_words", self.bad_words, MAX_BAD_WORDS, "lists of token ids")
        self._set("bad_words", tuple(_ids("bad_words", word, MAX_BAD_WORD) for word in words))
        if not all(self.bad_words):
            raise invalid("bad_words", "lists of at least one token id", words)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", TokenSet.of("allowed_token_ids", self.allowed_token_ids))

    def vary(self, max_tokens: int, seed: int | None) -> "SamplingParams":
        """The same parameters with another length and seed, the only ones in which the completions of a request differ.
        The others are shared and not checked again."""
        if (max_tokens, seed) == (self.max_tokens, self.seed):
            return self
        other = copy(self)
        other._set("max_tokens", max_tokens)
        other._set("seed", seed)
        other._check_numbers()
        return other

    def _check_numbers(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"an integer from 0 to max_tokens ({self.max_tokens})", self.min_tokens)
        if self.seed is not None:
            check_int("seed", self.seed, -(1 << 63), (1 << 63) - 1)

    @property
    def beyond_a_draw(self) -> list[str]:
        """The fields in use that need an extra."""
        return [f.name for f in fields(self) if f.name not in OF_THE_CORE and getattr(self, f.name) != f.default]

    @property
    def needs_text(self) -> list[str]:
        """The fields in use that only a model with a tokenizer can serve."""
        return [name for name in ("stop", "grammar") if getattr(self, name)]

    @property
    def computes_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, as its log-probabilities require."""
        return self.prompt_logprobs is not None

    @property
    def allowed(self) -> TokenSet | None:
        """`allowed_token_ids` as a set."""
        allowed = self.allowed_token_ids
        return None if allowed is None else TokenSet.of("allowed_token_ids", allowed)

    @property
    def highest_token(self) -> tuple[int, str]:
        """The highest token id in any field, and the name of the field. The id is -1 if there is none."""
        fields = {
            "allowed_token_ids": () if self.allowed is None else (self.allowed.highest,),
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": dict(self.logit_bias),
            "bad_words": [*chain(*self.bad_words)],
            "prediction": self.prediction,
        }
        return max((max(tokens, default=-1), name) for name, tokens in fields.items())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the only write to a frozen field: its canonical form


def _listed(name: str, value: object, limit: int, items: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid(name, f"a list of {items}", value)
    if len(value) > limit:
        raise invalid(name, f"at most {limit} {items}", f"{len(value)} of them")
    return tuple(value)


def _ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    return tuple(check_int(name, token, 0, MAX_TOKEN_ID) for token in _listed(name, value, limit, "token ids"))


def _stops(value: str | Sequence[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _listed("stop", value, MAX_STOPS, "strings")
    for stop in stops:
        # JSON can express half of a surrogate pair, and no tokenizer can encode it.
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH or re.search("[\ud800-\udfff]", stop):
            raise invalid("stop", f"a string of 1 to {MAX_STOP_LENGTH} whole characters, or a list of such", stop)
    return stops


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    pairs = value if isinstance(value, Mapping) else _listed("logit_bias", value, MAX_BIASES, "pairs, or a mapping")
    try:
        biases = dict(pairs)
    except (TypeError, ValueError):
        raise invalid("logit_bias", "a mapping of token id to bias, or its pairs", value) from None
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"at most {MAX_BIASES} biases", f"{len(biases)} of them")
    return tuple(
        (check_int("logit_bias", token, 0, MAX_TOKEN_ID), check_number("logit_bias", bias, -100, 100))
        for token, bias in biases.items()
    )
