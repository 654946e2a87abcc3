"""SamplingParams: what a client may ask of the tokens drawn for it. Checked once, here, and never changed after."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_TOKENS = 1 << 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TOKEN_ID = (1 << 31) - 1  # token ids travel as int32; the model's own vocabulary is checked at the engine's edge


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Every field is checked on creation; a bad one is a ValueError that names it."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off; -1, which other servers use for off, becomes 0
    min_p: float = 0.0
    stop: str | Sequence[str] = ()  # a single string becomes a tuple of one
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is off
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, top="max_tokens")
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, open_below=True)
        _integer("top_k", self.top_k, -1, MAX_TOKEN_ID)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 10, open_below=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", "True or False", self.ignore_eos)
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the one place where a frozen field is given its canonical form


def _refusal(name: str, allowed: str, given: object) -> ValueError:
    shown = repr(given)
    return ValueError(f"{name} must be {allowed}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")


def _integer(name: str, value: object, low: int, high: int, top: str = "") -> None:
    allowed = f"an integer from {low} to {f'{top} ({high})' if top else high}"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, allowed, value)


def _number(name: str, value: object, low: float, high: float, open_below: bool = False) -> None:
    allowed = f"a number {'above' if open_below else 'from'} {low} {'and at most' if open_below else 'to'} {high}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refusal(name, allowed, value)
    if not low <= value <= high or (open_below and value == low):
        raise _refusal(name, allowed, value)


def _listed(name: str, value: object, limit: int, of: str) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refusal(name, f"a list of {of}", value)
    if len(value) > limit:
        raise _refusal(name, f"at most {limit} {of}", f"{len(value)} of them")
    return tuple(value)


def _stops(value: str | Sequence[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _listed("stop", value, MAX_STOPS, "strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise _refusal("stop", f"a string of 1 to {MAX_STOP_LENGTH} characters, or a list of such", stop)
    return tuple(str(stop) for stop in stops)


def _stop_token_ids(value: Sequence[int]) -> tuple[int, ...]:
    ids = _listed("stop_token_ids", value, MAX_STOP_TOKENS, "token ids")
    for token in ids:
        _integer("stop_token_ids", token, 0, MAX_TOKEN_ID)
    return tuple(value)


def _biases(value: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", "a mapping of token id to bias", value)
    if len(value) > MAX_BIASES:
        raise _refusal("logit_bias", f"at most {MAX_BIASES} entries", f"{len(value)} of them")
    for token, bias in value.items():
        _integer("logit_bias", token, 0, MAX_TOKEN_ID)
        _number("logit_bias", bias, -100, 100)
    return dict(value)
