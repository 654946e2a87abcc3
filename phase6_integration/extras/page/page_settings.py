"""The setting of the page."""

from dataclasses import dataclass

from phase0_request.support.checks import check_bool
from phase0_request.support.options import check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    playground_text: bool | None = option(
        None,
        "show the text of all requests to those who watch the engine on the page at / (on, if nobody else can: without "
        "keys, on a loopback address)",
        check=check_bool,
    )

    def __post_init__(self) -> None:
        check_fields(self)
