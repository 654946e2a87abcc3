"""Page keys: the tokens of a page as one `bytes` object, by which the tree finds and compares pages."""

from array import array
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


# region exercise 4.1
def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Pack the whole pages of `tokens` into one `bytes` object each; an incomplete last page is left out.

    Bytes are hashed and compared in C, and the garbage collector does not have to look inside them. The first page
    starts with the salt, so prefixes of different salts have no page in common.
    """
    width = page_size * TOKEN_BYTES
    packed = array("i", tokens).tobytes()
    key = [packed[at : at + width] for at in range(0, len(packed) - width + 1, width)]
    if key:
        key[0] = salt.encode("utf-8", "surrogatepass") + key[0]
    return key


def common_pages(key: list[bytes], other: list[bytes], start: int) -> int:
    """Count the pages that `key` has in common with `other` from page `start` of `other` on.

    A binary search over slices: Python compares a slice in C, and single pages in a loop of bytecode.
    """
    low, high = 0, min(len(key), len(other) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if key[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


# endregion
