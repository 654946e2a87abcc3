"""Numbers that look random and depend on a key and a position alone: no state, so no neighbour can disturb them."""

from hashlib import blake2b

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: multiples of it spread evenly


def mix(number: int) -> int:
    """The finish of SplitMix64: one to one on 64 bits, and each bit given sways every bit returned."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def uniform(key: int, position: int) -> float:
    """A number from 0 to below 1, one of 2^53 that are equally likely, for one position under one key.

    A key is any 64 bits, of either sign. It is mixed before the position is added, so neighbouring keys have nothing
    in common.
    """
    start = mix((key + _STRIDE) & _MASK)
    return (mix((start + position * _STRIDE) & _MASK) >> 11) * 2.0**-53


def key_of(name: str, entropy: bytes) -> int:
    """A key for a request that brought no seed: the same for one name and one entropy, in every process."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=entropy).digest(), "big")
