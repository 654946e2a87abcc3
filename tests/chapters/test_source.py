"""Regions and anchors."""

from pathlib import Path

import pytest

from chapters.course import CourseError
from chapters.source import find_regions, listing, replace_regions

SOURCE = '''\
import functools


# region whole
class Pool:
    """Pages."""

    @functools.cache
    def size(self) -> int:
        """How many."""
        # region exercise 1.1
        return 4
        # endregion

    @property
    def free(self) -> int:
        return 1

    @free.setter
    def free(self, value: int) -> None:
        pass
# endregion


async def serve():
    def inner():
        return 1

    return inner
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pool.py").write_text(SOURCE)
    return tmp_path


def test_regions_nest_and_know_their_lines() -> None:
    regions = find_regions(SOURCE, "pool.py")
    assert {name: (region.first, region.last, region.indent) for name, (region,) in regions.items()} == {
        "whole": (3, 21, ""),
        "exercise 1.1": (10, 12, "        "),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\n# region a\n", "f.py:2: region 'a' is never closed"),
        ("# region a\n# region b\n# endregion\n", "f.py:1: region 'a' is never closed"),
        ("# endregion\n", "f.py:1: `# endregion` closes nothing"),
        ("# region a\n# endregion\n# region a\n# endregion\n", "f.py:3: region 'a' is already in this file"),
        ("# region a\n  # region a\n  # endregion\n# endregion\n", "f.py:2: region 'a' is already in this file"),
        ("# region a\n# endregion b\n", "f.py:2: `# endregion b` closes region 'a'"),
        ("# region\n# endregion\n", "f.py:1: a region's name is"),
        ("# region exercise one\n# endregion\n", "f.py:1: a region's name is"),
    ],
)
def test_a_wrong_marker_is_named_by_file_and_line(text: str, message: str) -> None:
    with pytest.raises(CourseError) as error:
        find_regions(text, "f.py")
    assert message in str(error.value)


def test_a_listing_is_dedented_and_has_no_markers(root: Path) -> None:
    assert listing(root, "pool.py#exercise 1.1") == "return 4"
    assert "region" not in listing(root, "pool.py#whole")
    assert listing(root, "pool.py#whole").startswith("class Pool:")


def test_a_definition_comes_with_decorators_and_docstring(root: Path) -> None:
    assert listing(root, "pool.py#Pool.size") == (
        '@functools.cache\ndef size(self) -> int:\n    """How many."""\n    return 4'
    )
    assert listing(root, "pool.py#serve").startswith("async def serve():")
    assert listing(root, "pool.py#serve.inner") == "def inner():\n    return 1"


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        ("pool.py#Pool.nothing", "no such region or definition; the file has: Pool, "),
        ("pool.py#Pool.free", "defined 2 times"),
        ("missing.py#x", "there is no file missing.py"),
        ("pool.py", "an anchor is path#name"),
    ],
)
def test_a_missing_anchor_says_what_there_is(root: Path, anchor: str, message: str) -> None:
    with pytest.raises(CourseError) as error:
        listing(root, anchor)
    assert message in str(error.value)


def test_a_signature_ends_after_the_docstring(root: Path) -> None:
    assert listing(root, "pool.py#Pool.size", signature=True) == (
        '@functools.cache\ndef size(self) -> int:\n    """How many."""\n    ...'
    )
    whole = listing(root, "pool.py#whole", signature=True)
    assert "@free.setter\n    def free(self, value: int) -> None:\n        pass" in whole
    assert "return" not in whole


def test_regions_are_replaced_piece_by_piece_and_the_rest_is_kept() -> None:
    text = "a\n# region exercise 0.1\n1\n2\n# endregion\nb\n# region exercise 0.1\n# endregion\n"
    assert replace_regions(text, "f.py", {"exercise 0.1": [["3"], ["4", "5"]]}) == (
        "a\n# region exercise 0.1\n3\n# endregion\nb\n# region exercise 0.1\n4\n5\n# endregion\n"
    )
    with pytest.raises(CourseError, match=r"f\.py: 2 pieces of region 'exercise 0.1', not 1"):
        replace_regions(text, "f.py", {"exercise 0.1": [["3"]]})
