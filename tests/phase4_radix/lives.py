"""The life of a request over a cache, as a scheduler leads it."""

from collections.abc import Sequence

from phase0_request import FinishReason, Request, Slice
from phase1_kv_pool import KVCache

SIZE = 4


def come(cache: KVCache, name: str, tokens: Sequence[int], salt: str = "") -> Request:
    """A request that is admitted and attached, as a scheduler does it."""
    request = Request(name, tuple(tokens), cache_salt=salt)
    resume(cache, request)
    return request


def resume(cache: KVCache, request: Request) -> None:
    request.admit(0.0)
    found = cache.attach(request)
    if found:
        request.advance(0, found)


def compute(cache: KVCache, request: Request, length: int | None = None, publish: bool = True) -> list[int]:
    """One step of one request. Returns the slots that it wrote."""
    piece = Slice(request, request.computed, request.total - request.computed if length is None else length)
    cache.grow(request, piece.stop)
    slots = cache.slots(piece)
    request.advance(piece.start, piece.length)
    if publish:
        cache.publish(request)
    return slots


def leave(cache: KVCache, request: Request) -> None:
    request.finish(FinishReason.LENGTH, 0.0)
    cache.release(request)
