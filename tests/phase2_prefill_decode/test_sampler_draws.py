"""The random numbers of the draws: uniform, independent and reproducible."""

import math

import numpy as np
import pytest
import torch

from phase2_prefill_decode.kernels.draw import STRIDE, arrivals, mix, numbers, signed
from phase2_prefill_decode.sampling.sampler import key_of

N = 100_000


def z_of_chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations a chi-square statistic is off (Wilson and Hilferty's cube root)."""
    d = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(((statistic / d) ** (1 / 3) - (1 - 2 / (9 * d))) / math.sqrt(2 / (9 * d)))


def uniforms(keys: list[int], positions: list[int], tokens: int = 1) -> np.ndarray:
    """In [0, 1): the upper 53 of the 64 random bits of each token."""
    bits = numbers(torch.tensor([*map(signed, keys)]), torch.tensor(positions), tokens)
    return (bits.flatten().numpy().view(np.uint64) >> np.uint64(11)) * 2.0**-53


def along_positions(key: int) -> np.ndarray:
    return uniforms([key] * N, [*range(1, N + 1)])


def along_keys(position: int) -> np.ndarray:
    return uniforms([*range(N)], [position] * N)


def along_names(position: int) -> np.ndarray:
    return uniforms([key_of(f"request-{i}", b"entropy") for i in range(N)], [position] * N)


WALKS = {
    "positions": lambda: along_positions(0),
    "positions of another key": lambda: along_positions(-(1 << 63)),
    "keys": lambda: along_keys(1),
    "keys, far on": lambda: along_keys(100_000),
    "names": lambda: along_names(7),
    "tokens": lambda: uniforms([0], [1], N),
    "tokens of neighbouring rows": lambda: uniforms([5] * 100, [*range(100)], N // 100),
}


def test_it_is_splitmix64() -> None:
    """The sequence for seed 1234567 that the literature prints."""
    found = mix(1234567 + torch.arange(1, 6) * STRIDE).numpy().view(np.uint64).tolist()
    assert found == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("walk", WALKS)
def test_draws_are_uniform_on_every_scale(walk: str) -> None:
    numbers = WALKS[walk]()
    for fine in (1, 1 << 10, 1 << 20, 1 << 40):  # the leading bits, and bits further down
        counts = np.bincount((numbers * fine % 1 * 100).astype(int), minlength=100)
        assert abs(z_of_chi_square(counts, np.full(100, N / 100))) < 4


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("apart", [1, 2, 16])
def test_neighbouring_draws_are_uncorrelated(walk: str, apart: int) -> None:
    numbers = WALKS[walk]()
    first, second = numbers[:-apart], numbers[apart:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(N)
    pairs = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    assert abs(z_of_chi_square(pairs, np.full(256, len(first) / 256))) < 4


def test_no_two_sequences_are_shifts_of_each_other() -> None:
    """Neither of two keys along positions, nor of two positions along tokens."""
    keys, positions = np.divmod(np.arange(90_000), 300)
    assert len({*uniforms(keys.tolist(), positions.tolist()).tolist()}) == 90_000
    assert len({*uniforms([3] * 300, [*range(300)], 300).tolist()}) == 90_000


def test_times_of_arrival_are_minus_log_of_1_minus_a_uniform_number() -> None:
    """Of a float32 number: so close to 0 it has 24 significant bits, and close to 1 steps of 2^-24."""
    anywhere = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 9999)
    bits = np.concatenate((np.arange(1, 1 << 20, 333), anywhere))
    v = np.minimum((bits.view(np.uint64) >> np.uint64(1)).astype(np.float32) * 2.0**-63, 1 - 2.0**-24)
    found = arrivals(torch.from_numpy(bits)).double()
    torch.testing.assert_close(found, torch.from_numpy(-np.log1p(-v.astype(np.float64))), rtol=1e-6, atol=2.0**-62)
    assert float(found.min()) > 0


def test_a_name_gives_the_same_key_in_every_process() -> None:
    assert key_of("request-1", b"e") == 0x442321E76400835A  # Python's own hash() differs from process to process
    assert key_of("request-1", b"e") != key_of("request-2", b"e")
    assert key_of("request-1", b"e") != key_of("request-1", b"f")
    assert 0 <= key_of("half a pair: \ud800", b"") < 1 << 64
