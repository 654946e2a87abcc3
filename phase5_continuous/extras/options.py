"""The options of this phase's extras."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phase0_request.support.checks import check_bool
from phase0_request.support.options import check_fields, option


def _check(name: str, config: Mapping[str, Any]) -> None:
    from phase5_continuous.extras.speculation.speculation import speculation_of

    speculation_of(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    speculative_config: Mapping[str, Any] | None = option(
        None,
        'draft tokens by ngram, suffix or draft_model, and verify them in one step: {"method": "ngram", '
        '"num_speculative_tokens": 7} (none)',
        "JSON",
        _check,
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantOptions:
    check_invariants: bool = option(False, "check the scheduler's invariants after every step; slow", check=check_bool)

    def __post_init__(self) -> None:
        check_fields(self)
