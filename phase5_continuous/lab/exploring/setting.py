"""Setting: what a world has, and which requests may come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALSO = {
    "late": "the mask of a request is late: it draws no token",
    "fail": "a slice fails beside any outcome of the others, and not beside tokens alone",
    "again": "the steps in flight fail through no request's fault, and are planned again",
    "reset": "the cache is emptied",
}


class Kind(NamedTuple):
    """A request that may come. Each letter of its prompt is a token."""

    prompt: str
    tokens: int = 2  # the most that it may get
    tenant: str = ""
    priority: int = 0
    salt: str = ""


def kinds(
    prompts: Sequence[str],
    tokens: int = 2,
    tenants: Sequence[str] = (),
    priorities: Sequence[int] = (),
    salts: Sequence[str] = (),
) -> tuple[Kind, ...]:
    """Requests with these prompts, and with one tenant, priority and salt for each if there are any."""
    for name, given in (("tenants", tenants), ("priorities", priorities), ("salts", salts)):
        if len(given) not in (0, len(prompts)):
            raise ValueError(f"--{name} must be {len(prompts)}, one for each prompt; got {len(given)}")
    places = range(len(prompts))
    return tuple(
        Kind(
            prompts[place],
            tokens,
            tenants[place] if tenants else "",
            priorities[place] if priorities else 0,
            salts[place] if salts else "",
        )
        for place in places
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A world: what may come, and the engine that it meets."""

    kinds: tuple[Kind, ...]
    pages: int = 4
    page_size: int = 2
    budget: int = 4
    chunk: int = 4
    places: int = 8
    watermark: float = 0.0
    policy: str = "fcfs"
    ahead: int = 0
    shares: bool = True
    fair: bool = False
    drafts: int = 0
    limit: int | None = None  # requests that may wait
    also: tuple[str, ...] = ()  # what else may happen, of ALSO
    ends: tuple[str, ...] = ("abort",)  # how requests end from outside
    lost: int | None = None  # steps that may be lost; None: any number

    @property
    def reserved(self) -> int:
        """The pages of the watermark."""
        return int(self.watermark * self.pages)

    @property
    def bound(self) -> int:
        """The steps in which all requests end, if nothing new arrives: of those that run, the first in rank keeps its
        pages, and computes a token whenever it is its turn among the decodes."""
        room = self.budget - max(self.budget // 8, 1)
        turns = -(-len(self.kinds) // room)
        return turns * sum(len(kind.prompt) + kind.tokens for kind in self.kinds)
