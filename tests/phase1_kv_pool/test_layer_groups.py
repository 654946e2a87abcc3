"""Groups of layers: their pages, and how many requests fit into a pool."""

import pytest

from phase1_kv_pool import KVLayout
from phase1_kv_pool.extras.layer_groups import UNLIMITED, GroupedLayout, LayerGroups, within

GIB = 1 << 30
LONG = 32_768
STEP = 512  # tokens of a chunk
GEMMA3_1B = [None if layer % 6 == 5 else 512 for layer in range(26)], KVLayout(26, 1, 256)  # 22 windows, 4 full
GPT_OSS_20B = [None if layer % 2 else 128 for layer in range(24)], KVLayout(24, 8, 64)
MISTRAL_7B = [4096] * 32, KVLayout(32, 8, 128)


def grouped(windows: list[int | None], layout: KVLayout, in_flight: int = STEP) -> GroupedLayout:
    groups = LayerGroups.of(windows, in_flight)
    assert groups is not None
    return GroupedLayout.of(layout, groups)


@pytest.mark.parametrize(
    ("windows", "full", "windowed", "size"),
    [(GEMMA3_1B[0], 1, 6, 4), (GPT_OSS_20B[0], 1, 1, 12), (MISTRAL_7B[0], 0, 1, 32), ([None, *[7] * 31], 1, 16, 2)],
)
def test_groups_have_one_size_and_each_layer_a_place_of_its_own(
    windows: list[int | None], full: int, windowed: int, size: int
) -> None:
    groups = LayerGroups.of(windows)
    assert groups is not None
    assert (groups.full, groups.windowed, groups.size) == (full, windowed, size)
    assert len(set(groups.places)) == len(windows)
    for window, (group, place) in zip(windows, groups.places, strict=True):
        assert (group < full) == (window is None)
        assert 0 <= group < groups.count
        assert 0 <= place < size


def test_no_groups_without_a_window_that_hides_something() -> None:
    assert LayerGroups.of([None] * 4) is None
    assert within([None, 512, 4096], 4096) == [None, 512, None]


@pytest.mark.parametrize("in_flight", [1, 2, 7, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 33])
def test_a_span_holds_the_window_and_what_is_in_flight(window: int, page_size: int, in_flight: int) -> None:
    """After any number of computed tokens; the span begins a whole window before the last full page."""
    groups = LayerGroups.of([window], in_flight)
    assert groups is not None
    before, span = groups.pages_before(page_size), groups.span(page_size)
    for computed in range(4 * page_size):
        full = computed // page_size
        first = (full - before) * page_size
        assert first <= computed - window + 1
        assert first + span * page_size >= computed + in_flight
        assert full * page_size - first - page_size < window - 1 <= before * page_size  # no page too many


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [(GEMMA3_1B, 9, 53), (GPT_OSS_20B, 5, 10), (MISTRAL_7B, 2, 14)],
    ids=["gemma3-1b", "gpt-oss-20b", "mistral-7b"],
)
def test_requests_of_32k_tokens_that_fit_into_8_gib(
    model: tuple[list[int | None], KVLayout], before: int, after: int
) -> None:
    windows, layout = model
    assert layout.requests_in(8 * GIB, LONG) == before
    layout = grouped(windows, layout)
    assert layout.requests_in(8 * GIB, LONG) == after
    longest = layout.groups.tokens_in(layout.pages_in(8 * GIB), layout.page_size) if layout.groups else 0
    assert longest > after * LONG // 2


def test_the_longest_request_is_the_last_that_fits() -> None:
    for windows in ([None, 40, 40], [None, 40], [40, 40]):
        groups = LayerGroups.of(windows, 10)
        assert groups is not None
        for pages in range(1, 80):
            tokens = groups.tokens_in(pages, 4)
            assert groups.pages_for(tokens, 4) <= pages
            assert tokens == UNLIMITED or groups.pages_for(tokens + 1, 4) > pages
