"""The random numbers of the draws: uniform, independent and reproducible."""

import math

import numpy as np
import pytest

from phase2_prefill_decode.sampling import key_of, mix, uniform

N = 100_000


def z_of_chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations a chi-square statistic is off (Wilson and Hilferty's cube root)."""
    d = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(((statistic / d) ** (1 / 3) - (1 - 2 / (9 * d))) / math.sqrt(2 / (9 * d)))


def along_positions(key: int) -> np.ndarray:
    return np.array([uniform(key, position) for position in range(1, N + 1)])


def along_keys(position: int) -> np.ndarray:
    return np.array([uniform(key, position) for key in range(N)])


def along_names(position: int) -> np.ndarray:
    return np.array([uniform(key_of(f"request-{i}", b"entropy"), position) for i in range(N)])


WALKS = {
    "positions": lambda: along_positions(0),
    "positions of another key": lambda: along_positions(-(1 << 63)),
    "keys": lambda: along_keys(1),
    "keys, far on": lambda: along_keys(100_000),
    "names": lambda: along_names(7),
}


def test_it_is_splitmix64() -> None:
    """The sequence for seed 1234567 that the literature prints."""
    numbers = [mix((1234567 + i * 0x9E3779B97F4A7C15) % (1 << 64)) for i in range(1, 6)]
    assert numbers == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("walk", WALKS)
def test_draws_are_uniform_on_every_scale(walk: str) -> None:
    numbers = WALKS[walk]()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for fine in (1, 1 << 10, 1 << 20, 1 << 40):  # the leading bits, and bits further down
        counts = np.bincount((numbers * fine % 1 * 100).astype(int), minlength=100)
        assert abs(z_of_chi_square(counts, np.full(100, N / 100))) < 4
    assert not np.any(numbers * 2**53 % 1)  # 53 bits and no more


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("apart", [1, 2, 16])
def test_neighbouring_draws_are_uncorrelated(walk: str, apart: int) -> None:
    numbers = WALKS[walk]()
    first, second = numbers[:-apart], numbers[apart:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(N)
    pairs = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    assert abs(z_of_chi_square(pairs, np.full(256, len(first) / 256))) < 4


def test_the_sequences_of_two_keys_are_not_shifts_of_each_other() -> None:
    """Positions are added to a mixed key, so the next key must not repeat this one's sequence a position later."""
    numbers = {uniform(key, position) for key in range(300) for position in range(300)}
    assert len(numbers) == 300 * 300


def test_a_name_gives_the_same_key_in_every_process() -> None:
    assert key_of("request-1", b"e") == 0x442321E76400835A  # Python's own hash() differs from process to process
    assert key_of("request-1", b"e") != key_of("request-2", b"e")
    assert key_of("request-1", b"e") != key_of("request-1", b"f")
    assert 0 <= key_of("half a pair: \ud800", b"") < 1 << 64
