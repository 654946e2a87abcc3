"""Pictures of what a failing test held: as many as the time allows, whatever the objects do."""

import signal
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from chapters import pictures
from phase1_kv_pool.allocator import PageAllocator

MANY = 1 << 40  # times


class Endless:
    """An object of which no picture comes to an end, and which catches what it can."""

    begun = 0

    @property
    def slices(self) -> Iterator[Any]:
        Endless.begun += 1
        for _ in repeat(None, MANY):
            try:
                int("x")
            except Exception:
                continue
        return iter(())

    num_tokens = 3


Batch = type("Batch", (Endless,), {})


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "SECONDS", 0.2)
    monkeypatch.setattr(Endless, "begun", 0)


@pytest.mark.usefixtures("hurried")
def test_when_the_time_is_up_what_was_drawn_so_far_is_shown() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    before = signal.getsignal(signal.SIGALRM)
    (picture,) = pictures.draw([{"pages": allocator}, {"step": Batch()}])
    assert picture.startswith("pages: 3 of 4 pages free")
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("hurried")
def test_the_time_is_for_all_pictures_together() -> None:
    assert pictures.draw([{"a": Batch(), "b": Batch()}, {"c": Batch(), "pages": PageAllocator(4)}]) == []
    assert Endless.begun == 1


def test_what_cannot_be_drawn_makes_way_for_the_next_of_its_kind() -> None:
    broken = type("PageAllocator", (), {})()
    (picture,) = pictures.draw([{"@hidden": PageAllocator(2), "broken": broken, "pages": PageAllocator(4)}])
    assert picture.startswith("pages: 4 of 4 pages free")
