"""RopeParameters: the rotary embedding of a model, as its config.json describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number
from phase2_prefill_decode.loading.families import MAX_LENGTH

_YARN = "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # the parameters that each type has
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """The rotary embedding of a model. Parameters that its type does not have keep their defaults; see `rope`."""

    rope_type: str = "default"
    rope_theta: float = 10_000.0  # the last pair rotates nearly this many times slower than the first
    factor: float = 1.0  # by which the context was extended
    original_max_position_embeddings: int = 0  # the context before that
    low_freq_factor: float = 1.0  # llama3: pairs with fewer turns than this over that context are slowed by `factor`
    high_freq_factor: float = 4.0  # llama3: pairs with more turns than this are unchanged
    beta_slow: float = 1.0  # yarn: the same two bounds
    beta_fast: float = 32.0
    truncate: bool = True  # yarn: round the bounds outward to whole pairs
    attention_factor: float | None = None  # yarn: scale of queries and keys; None: from `factor`
    mscale: float = 0.0  # yarn: if both are set, they change the scale that follows from `factor`
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        used = ROPE_TYPES[check_choice("rope_type", self.rope_type, ROPE_TYPES)]
        check_number("rope_theta", self.rope_theta, 1, above=True)
        for parameter in fields(self)[2:]:
            value = getattr(self, parameter.name)
            if parameter.name not in used and value != parameter.default:
                raise ConfigError(f"rope_type {self.rope_type!r} has no parameter {parameter.name}, got {value!r}")
        check_number("rope factor", self.factor, 1)
        original = "original_max_position_embeddings"
        check_int(f"rope {original}", self.original_max_position_embeddings, int(original in used), MAX_LENGTH)
        check_number("rope low_freq_factor", self.low_freq_factor, 0, above=True)
        check_number("rope high_freq_factor", self.high_freq_factor, self.low_freq_factor, above=True)
        check_number("rope beta_slow", self.beta_slow, 0, above=True)
        check_number("rope beta_fast", self.beta_fast, self.beta_slow)
        check_bool("rope truncate", self.truncate)
        check_number("rope mscale", self.mscale, 0)
        check_number("rope mscale_all_dim", self.mscale_all_dim, 0)
        if self.attention_factor is not None:
            check_number("rope attention_factor", self.attention_factor, 0, above=True)

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], max_position_embeddings: int) -> "RopeParameters":
        """From the `rope_parameters` of a config.json, or its `rope_scaling` with `rope_theta` added."""
        rope_type = check_choice("rope_type", written.get("rope_type") or written.get("type") or "default", ROPE_TYPES)
        names = "rope_theta", *ROPE_TYPES[rope_type]
        known = {name: written[name] for name in names if written.get(name) is not None}
        if "original_max_position_embeddings" in names:
            known.setdefault("original_max_position_embeddings", max_position_embeddings)
        if rope_type == "yarn" and "factor" in written:  # null means: the ratio of the two lengths
            original = known["original_max_position_embeddings"]
            check_int("original_max_position_embeddings", original, 1, MAX_LENGTH)
            known.setdefault("factor", max_position_embeddings / original)
        missing = {"factor", "low_freq_factor", "high_freq_factor"} & set(names) - known.keys()
        if missing:
            raise ConfigError(f"rope_type {rope_type!r} needs {', '.join(sorted(missing))}, got {dict(written)}")
        return cls(rope_type=rope_type, **known)
