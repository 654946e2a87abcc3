"""The settings of tools: how a model writes its calls and its reasoning."""

from dataclasses import dataclass
from functools import partial

from phase0_request.support.checks import check_bool, check_choice
from phase0_request.support.options import check_fields, option
from phase6_integration.extras.tools.tool_formats import BY_NAME, REASONINGS

TOOL_PARSERS = (*BY_NAME, "none")
REASONING_PARSERS = (*REASONINGS, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    enable_auto_tool_choice: bool = option(
        True, "look for tool calls in answers with tool_choice auto", check=check_bool
    )
    tool_call_parser: str | None = option(
        None,
        f"how the model writes tool calls: {', '.join(TOOL_PARSERS)} (by its chat template)",
        "NAME",
        partial(check_choice, allowed=TOOL_PARSERS),
    )
    reasoning_parser: str | None = option(
        None,
        f"how it writes its reasoning: {', '.join(REASONING_PARSERS)} (by its chat template)",
        "NAME",
        partial(check_choice, allowed=REASONING_PARSERS),
    )

    def __post_init__(self) -> None:
        check_fields(self)
