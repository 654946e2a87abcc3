"""Replays against a plain list of all that was said, and what they say about memories of several sizes."""

import random

import pytest

from phase4_radix.lab import replay
from phase4_radix.lab.replay import Chats, Groups, Turn, chats, outcome, play, pressure
from phase4_radix.prefix_cache import PrefixCache

SIZE = 4


def longest(seen: list[tuple[int, ...]], prompt: tuple[int, ...]) -> int:
    """How many tokens, in whole pages, of a prompt but its last token some earlier one began with."""
    found = 0
    while found + SIZE < len(prompt) and any(one[: found + SIZE] == prompt[: found + SIZE] for one in seen):
        found += SIZE
    return found


def test_with_room_for_everything_all_is_found_that_was_computed() -> None:
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


def test_who_chats_goes_on_from_all_that_was_said() -> None:
    turns = list(Chats(people=5, requests=200).turns_in_order())
    ends = {turn.prompt + turn.answer for turn in turns}
    lengths = [len(turn.prompt) + len(turn.answer) for turn in turns]
    begun = [turn for turn in turns if not any(turn.prompt[: len(end)] == end for end in ends)]
    assert len({turn.prompt[:256] for turn in turns}) == 4
    assert all(256 + 16 <= len(turn.prompt) <= 256 + 48 for turn in begun)
    assert 20 < len(begun) < 60  # of some six turns each
    assert max(lengths) <= 256 + 11 * (48 + 144)
    assert (
        turns
        == list(Chats(people=5, requests=200).turns_in_order())
        != list(Chats(people=5, requests=200).turns_in_order(seed=1))
    )


def test_more_memory_finds_more_until_all_is_found_that_there_is() -> None:
    sizes = (192, 512, 4096)
    rates = {people: [one.hit_rate for one in chats(people, sizes)] for people in (8, 64)}
    for found in rates.values():
        assert found == sorted(found)
    assert rates[8][1] > 0.9 > 0.6 > rates[64][1]  # what few people say fits sooner
    assert min(found[-1] for found in rates.values()) > 0.93


def test_a_loop_that_does_not_fit_finds_nothing_where_chance_finds_some() -> None:
    """Least recently used is what a loop needs next."""
    sizes = (64, 96, 136)
    in_turn, at_random = pressure(in_turn=True, sizes=sizes), pressure(in_turn=False, sizes=sizes)
    assert [one.hit_rate for one in in_turn[:2]] == [0.0, 0.0]
    assert 0.4 < at_random[0].hit_rate < at_random[1].hit_rate < 0.7
    assert in_turn[2].hit_rate > 0.93
    assert [one.pages for one in in_turn] == [*sizes]
    assert in_turn[0].evictions_each > 33
    assert in_turn[2].evictions_each < 2


def test_what_all_begin_with_outlives_what_each_says() -> None:
    """One group, in a memory that holds what it has in common and one request's own: leaves go, the run above stays."""
    turns = list(Groups(groups=1, requests=50).turns_in_order())
    found = [moment.found for moment in play(turns, PrefixCache(32 + 3, 16))]
    assert found == [0] + [512] * 49


def test_an_outcome_adds_up() -> None:
    rng = random.Random(1)
    turns = [Turn(tuple(rng.choices(range(3), k=9)), (7, 7)) for _ in range(100)]
    one = outcome(turns, 5, page_size=2)
    moments = list(play(turns, PrefixCache(5, 2)))
    assert one.hit_rate == sum(m.found for m in moments) / 900
    assert one.evictions == sum(m.evicted for m in moments) > 100
    assert one.evictions_each == one.evictions / 100
    assert outcome([], 5) == replay.Outcome(5, 0.0, 0, 0.0)


@pytest.mark.parametrize("in_turn", [True, False])
def test_groups_begin_alike_and_end_each_in_its_own_way(in_turn: bool) -> None:
    turns = list(Groups(groups=3, requests=30, common=20, own=5, in_turn=in_turn).turns_in_order())
    beginnings = [turn.prompt[:20] for turn in turns]
    assert len(set(beginnings)) == 3
    assert len({turn.prompt[20:] for turn in turns}) == 30
    assert (beginnings == beginnings[:3] * 10) is in_turn
