"""SamplingParams: what a client may ask of the tokens drawn for it. Checked once, here, and never changed after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # a mapping becomes its pairs
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", "True or False", self.ignore_eos)
        self._set("top_k", max(self.top_k, 0))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the one place where a frozen field is given its canonical form


def _refusal(name: str, allowed: str, given: object) -> ValueError:
    huge = isinstance(given, int) and given.bit_length() > 256  # Python will not even print the hugest
    shown = "a far larger number" if huge else repr(given)
    return ValueError(f"{name} must be {allowed}, got {shown if len(shown) <= 80 else shown[:77] + '...'}")


def _integer(name: str, value: object, low: int, high: int, top: str = "") -> int:
    allowed = f"an integer from {low} to {f'{top} ({high})' if top else high}"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refusal(name, allowed, value)
    return value


def _number(name: str, value: object, low: float, high: float, open_below: bool = False) -> float:
    allowed = f"a number {'above' if open_below else 'from'} {low} {'and at most' if open_below else 'to'} {high}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(name, allowed, value)
    if not low <= value <= high or (open_below and value == low):  # NaN is in no range
        raise _refusal(name, allowed, value)
    return value


def _listed(name: str, value: object, limit: int, of: str) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _refusal(name, f"a list of {of}", value)
    if len(value) > limit:
        raise _refusal(name, f"at most {limit} {of}", f"{len(value)} of them")
    return tuple(value)


def _stops(value: str | Sequence[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else _listed("stop", value, MAX_STOPS, "strings")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH or _broken(stop):
            raise _refusal("stop", f"a string of 1 to {MAX_STOP_LENGTH} whole characters, or a list of such", stop)
    return tuple(str(stop) for stop in stops)


def _broken(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which JSON can write and no tokenizer reads."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _stop_token_ids(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        _token("stop_token_ids", token) for token in _listed("stop_token_ids", value, MAX_STOP_TOKENS, "token ids")
    )


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    kept = []
    for pair in _listed("logit_bias", pairs, MAX_BIASES, "pairs of token id and bias"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _refusal("logit_bias", "a mapping of token id to bias, or its pairs", value)
        token, bias = pair
        kept.append((_token("logit_bias", token), _number("logit_bias", bias, -100, 100)))
    return tuple(kept)


def _token(name: str, value: object) -> int:
    return _integer(name, value, 0, MAX_TOKEN_ID)
