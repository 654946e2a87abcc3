"""Names of cached pages that are equal in every process."""

import pytest

from phase4_radix.extras.block_hashes import block_hashes
from tests.phase4_radix.steps import named

TOKENS = [3, 1, 4, 1, 5, 9, 2]


def test_a_block_is_named_by_its_tokens_and_all_before_them() -> None:
    assert block_hashes(TOKENS, 2) == [named("", TOKENS[:end], 2) for end in (2, 4, 6)]
    assert block_hashes(TOKENS, 2)[:2] == [15943714873248007452, 8170591441812291416]  # in any process


def test_a_salt_changes_every_block_of_the_prefix() -> None:
    salted = block_hashes(TOKENS, 2, "a")
    assert salted == [named("a", TOKENS[:end], 2) for end in (2, 4, 6)]
    assert not {*salted} & {*block_hashes(TOKENS, 2), *block_hashes(TOKENS, 2, "b")}


@pytest.mark.parametrize("salt", ["", "a", "\ud800"])
def test_a_prefix_can_be_hashed_in_parts(salt: str) -> None:
    whole = block_hashes(TOKENS, 2, salt)
    assert block_hashes(TOKENS[2:], 2, salt, parent=whole[0]) == whole[1:]
