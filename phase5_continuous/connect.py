"""The one module of phase 5 that knows its extras."""

from collections.abc import Mapping
from typing import Any

from phase0_request.checks import check_extras


def check_speculation(name: str, config: Mapping[str, Any]) -> None:
    """ValueError if speculation cannot be as its config describes it."""
    check_extras("phase5_continuous", name)
    from phase5_continuous.extras.speculation.speculation import speculation_of

    speculation_of(config)
