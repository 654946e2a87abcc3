"""Rope: how a head is turned by its position. Each pair of its numbers turns at its own speed, the first one fastest.

A model trained on short texts reads longer ones if its slow pairs turn slower still, so that no angle is larger than
any it has seen. The kinds differ in the pairs that this is done to:

    default   none
    linear    all
    llama3    those that make few turns over the trained length; those between few and many, in part
    yarn      the same with other bounds, and queries and keys made a little longer, which sharpens attention
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phase2_prefill_decode.fields import ConfigError, flag, integer, number, one_of

MAX_LENGTH = 1 << 24  # tokens; the longest context anyone has trained for is smaller
_YARN = "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"
USES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_length", *_YARN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of one model. Fields that its kind has no use for stay as they are by default."""

    kind: str = "default"
    theta: float = 10_000.0  # how many times slower the last pair turns than the first, nearly
    factor: float = 1.0  # the context is so many times what the model was first trained on,
    original_length: int = 0  # which is this
    low_freq_factor: float = 1.0  # llama3: pairs with fewer turns than this over that length are slowed by the factor,
    high_freq_factor: float = 4.0  # those with more than this are left alone
    beta_slow: float = 1.0  # yarn: likewise
    beta_fast: float = 32.0
    truncate: bool = True  # yarn: round these bounds outward to whole pairs
    attention_factor: float | None = None  # yarn: how much longer queries and keys become; None: as `factor` suggests
    mscale: float = 0.0  # yarn: where both are given, they change what `factor` suggests
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        one_of("the kind of rope", self.kind, tuple(USES))
        number("rope theta", self.theta, 1, open_below=True)
        used = USES[self.kind]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name not in used and value != field.default:
                raise ConfigError(f"rope {field.name} has no meaning for the kind {self.kind!r}, got {value!r}")
        number("rope factor", self.factor, 1)
        integer("rope original_length", self.original_length, int("original_length" in used), MAX_LENGTH)
        number("rope low_freq_factor", self.low_freq_factor, 0, open_below=True)
        number("rope high_freq_factor", self.high_freq_factor, self.low_freq_factor, open_below=True)
        number("rope beta_slow", self.beta_slow, 0, open_below=True)
        number("rope beta_fast", self.beta_fast, self.beta_slow)
        flag("rope truncate", self.truncate)
        number("rope mscale", self.mscale, 0)
        number("rope mscale_all_dim", self.mscale_all_dim, 0)
        if self.attention_factor is not None:
            number("rope attention_factor", self.attention_factor, 0, open_below=True)

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], max_length: int) -> "Rope":
        """From a config.json's `rope_parameters`, or its `rope_scaling` with `rope_theta` put in."""
        kind = one_of("the kind of rope", written.get("rope_type") or written.get("type") or "default", tuple(USES))
        given = {name: written.get(_WRITTEN.get(name, name)) for name in ("theta", *USES[kind])}
        known = {name: value for name, value in given.items() if value is not None}
        if "original_length" in given:
            known.setdefault("original_length", max_length)
        if kind == "yarn" and "factor" in written:  # there it may be null, and is what the lengths say
            length = integer("original_max_position_embeddings", known["original_length"], 1, MAX_LENGTH)
            known.setdefault("factor", max_length / length)
        missing = {"factor", "low_freq_factor", "high_freq_factor"} & given.keys() - known.keys()
        if missing:
            raise ConfigError(f"rope of the kind {kind!r} needs {', '.join(sorted(missing))}, got {dict(written)}")
        return cls(kind=kind, **known)

    @property
    def scaling(self) -> float:
        """By how much queries and keys grow, each."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _growth(self.factor, self.mscale) / _growth(self.factor, self.mscale_all_dim)
        return _growth(self.factor)


_WRITTEN = {"theta": "rope_theta", "original_length": "original_max_position_embeddings"}  # what files call them


def _growth(factor: float, mscale: float = 1.0) -> float:
    """What YaRN's authors found by trying."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
