"""Replays against a plain list of all prompts and answers, and hit rates by cache size."""

from phase4_radix.extras.invariants import check_cache
from phase4_radix.lab.replay import Chats, play, pressure
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
        check_cache(cache)
    assert cache.counts.hit_rate > 0.6


def test_lru_finds_nothing_in_a_loop_that_does_not_fit() -> None:
    """The least recently used prefix is the one that the loop needs next. At random, some are still cached."""
    sizes = (64, 96, 136)
    in_turn, at_random = pressure(in_turn=True, sizes=sizes), pressure(in_turn=False, sizes=sizes)
    assert [one.hit_rate for one in in_turn[:2]] == [0.0, 0.0]
    assert 0.4 < at_random[0].hit_rate < at_random[1].hit_rate < 0.7
    assert in_turn[2].hit_rate > 0.93
