"""Replays against a plain list of all prompts and answers, and hit rates by cache size."""

from phase4_radix.lab.replay import Chats, Groups, chats, play, pressure
from phase4_radix.prefix_cache import PrefixCache

SIZE = 4


def longest(seen: list[tuple[int, ...]], prompt: tuple[int, ...]) -> int:
    """How many tokens of a prompt, in whole pages and without its last token, an earlier sequence started with."""
    found = 0
    while found + SIZE < len(prompt) and any(one[: found + SIZE] == prompt[: found + SIZE] for one in seen):
        found += SIZE
    return found


def test_a_large_cache_finds_everything_that_was_computed() -> None:
    turns = list(Chats(people=3, requests=60, instruction=10, question=5, answer=7, turns=3).turns_in_order())
    cache = PrefixCache(4096, SIZE)
    seen: list[tuple[int, ...]] = []
    for turn, moment in zip(turns, play(turns, cache), strict=True):
        assert (moment.prompt, moment.found) == (len(turn.prompt), longest(seen, turn.prompt))
        assert moment.evicted == 0
        assert moment.cached + moment.free == 4096
        whole = turn.prompt + turn.answer[:-1]  # the last token of an answer is never computed
        seen.append(whole[: len(whole) // SIZE * SIZE])
        cache.check()
    assert cache.counts.hit_rate > 0.6


def test_every_turn_repeats_the_conversation_so_far() -> None:
    turns = list(Chats(people=5, requests=200).turns_in_order())
    ends = {turn.prompt + turn.answer for turn in turns}
    begun = [turn for turn in turns if not any(turn.prompt[: len(end)] == end for end in ends)]
    assert len({turn.prompt[:256] for turn in turns}) == 4
    assert all(256 + 16 <= len(turn.prompt) <= 256 + 48 for turn in begun)
    assert 20 < len(begun) < 60  # of some six turns each
    assert turns == list(Chats(people=5, requests=200).turns_in_order())


def test_hit_rate_grows_with_the_cache_until_all_conversations_fit() -> None:
    sizes = (192, 512, 4096)
    rates = {people: [one.hit_rate for one in chats(people, sizes)] for people in (8, 64)}
    for found in rates.values():
        assert found == sorted(found)
    assert rates[8][1] > 0.9 > 0.6 > rates[64][1]  # fewer conversations fit sooner
    assert min(found[-1] for found in rates.values()) > 0.93


def test_lru_finds_nothing_in_a_loop_that_does_not_fit() -> None:
    """The least recently used prefix is the one that the loop needs next. At random, some are still cached."""
    sizes = (64, 96, 136)
    in_turn, at_random = pressure(in_turn=True, sizes=sizes), pressure(in_turn=False, sizes=sizes)
    assert [one.hit_rate for one in in_turn[:2]] == [0.0, 0.0]
    assert 0.4 < at_random[0].hit_rate < at_random[1].hit_rate < 0.7
    assert in_turn[2].hit_rate > 0.93


def test_the_shared_prefix_outlives_the_suffixes() -> None:
    """One group, in a cache that holds its prefix and one suffix: the leaves are evicted, the prefix stays."""
    turns = list(Groups(groups=1, requests=50).turns_in_order())
    found = [moment.found for moment in play(turns, PrefixCache(32 + 3, 16))]
    assert found == [0] + [512] * 49
