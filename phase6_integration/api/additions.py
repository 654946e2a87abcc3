"""What extras add to a request and to its answer: the seam for fields that the core does not have.

A `Feature` is called for each request. It checks the fields that it knows before anything is tokenized, and returns
what prepares the answer once the tokens are there. That sets fields of SamplingParams, and may add an `Addition`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phase6_integration.api.errors import RequestError
from phase6_integration.api.schemas import SamplingFields
from phase6_integration.process.outputs import Chunk, Output

Json = dict[str, Any]


class Addition:
    """An extra's part of the answer to one request. A method that it does not define adds nothing."""

    outputs: Sequence[Output] = ()  # of the answer, once they are submitted
    excluding: Sequence[str] = ()  # the fields of the request by which it excludes tokens

    def read(self, new: Chunk) -> bool:
        """Read a new chunk; its text may be changed. Returns whether there is more to send than text."""
        return False

    def write(self, choice: Json, new: Chunk | None, whole: bool) -> None:
        """Change a choice before it is written, in a whole response or an event. It has the tokens of `new`,
        which is None for the opening event."""

    def usage(self, usage: Json) -> None:
        """Change the usage."""

    def fields(self) -> Json:
        """More fields of a whole response."""
        return {}

    def warnings(self, reasons: Sequence[str]) -> Iterable[str]:
        """Warnings for the headers. The finish reasons are the ones known so far."""
        return ()

    def failure(self, error: str, so_far: str) -> RequestError | None:
        """The error for the client if this error, which ended an output, is about this addition."""
        return None


@dataclass(slots=True)
class Asked:
    """A request with its tokens. Features fill in the rest."""

    body: SamplingFields
    client: str
    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]  # max_tokens of each prompt
    texts: Mapping[int, str] = field(default_factory=dict)  # of the prompts that were given as text, and not truncated
    own_fields: Mapping[str, str] = field(default_factory=dict)  # names of fields in this API, by those of the body
    params: Json = field(default_factory=dict)  # of SamplingParams
    additions: list[Addition] = field(default_factory=list)
    first_event: Json = field(default_factory=dict)  # fields that only the first event of a stream has


Prepare = Callable[[Asked], Awaitable[None]]
# RequestError if the fields cannot be served; None: nothing is asked
Feature = Callable[[SamplingFields], Prepare | None]
