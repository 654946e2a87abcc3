"""Runs: tokens as the tree compares them, in whole pages.

A page of tokens is one `bytes` object: four bytes a token, compared and hashed in C, and nothing that the garbage
collector has to look at. The first page of a prefix has the salt before its tokens, so that prefixes of different salts
have no page in common.
"""

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def in_pages(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """The whole pages among the tokens; what is left at the end is left out."""
    width = page_size * TOKEN_BYTES
    packed = array("i", tokens).tobytes()
    run = [packed[at : at + width] for at in range(0, len(packed) - width + 1, width)]
    if run:
        run[0] = salt.encode("utf-8", "surrogatepass") + run[0]
    return run


def tokens_of(run: Sequence[bytes], page_size: int) -> list[int]:
    """The tokens of a run, without the salt."""
    return [token for page in run for token in array("i", page[-page_size * TOKEN_BYTES :])]


def salt_of(page: bytes, page_size: int) -> str:
    """The salt before the first page of a prefix; before any other there is none."""
    return page[: -page_size * TOKEN_BYTES].decode("utf-8", "surrogatepass")


def common(run: list[bytes], other: list[bytes], start: int) -> int:
    """How many pages a run has in common with another from its page `start` on.

    By halving: two slices are compared in C, page by page in Python they would not be.
    """
    low, high = 0, min(len(run), len(other) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
