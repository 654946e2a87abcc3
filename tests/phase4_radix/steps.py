"""The cache calls that a scheduler makes for a request."""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from phase0_request import FinishReason, Request, Slice
from phase1_kv_pool import PagedCache

SIZE = 4


def admit(cache: PagedCache, name: str, tokens: Sequence[int], salt: str = "") -> Request:
    """Admit a new request and attach it to the cache."""
    request = Request(name, tuple(tokens), cache_salt=salt)
    resume(cache, request)
    return request


def resume(cache: PagedCache, request: Request) -> None:
    request.admit(0.0)
    found = cache.attach(request)
    if found:
        request.advance(0, found)


def compute(cache: PagedCache, request: Request, length: int | None = None, publish: bool = True) -> list[int]:
    """One step of one request. Returns the slots that it writes."""
    part = Slice(request, request.computed, request.total - request.computed if length is None else length)
    cache.grow(request, part.stop)
    slots = cache.slots(part)
    request.advance(part.start, part.length)
    if publish:
        cache.publish(request)
    return slots


def finish(cache: PagedCache, request: Request) -> None:
    request.finish(FinishReason.LENGTH, 0.0)
    cache.release(request)


def named(salt: str, tokens: Sequence[int], size: int) -> int:
    """The hash of the block that ends a prefix, computed from its start."""
    digest, salted = bytes(8), salt.encode()
    for start in range(0, len(tokens), size):
        block = struct.pack(f"={size}i", *tokens[start : start + size])
        digest, salted = blake2b(digest + salted + block, digest_size=8).digest(), b""
    return int.from_bytes(digest, "little")
