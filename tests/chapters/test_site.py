"""The site of the book without Sphinx: what its pages know of each other, and the check of what is built."""

import re
from pathlib import Path

import pytest

from chapters.book.check import faults
from chapters.book.pages import CHAPTERS, below, contents, terms


def test_the_plan_has_every_chapter_with_the_hours_of_its_head() -> None:
    rows = re.findall(r"^\| (\d) \| \[.*?\]\((\w+\.md)\) \| (.*?) \|", (CHAPTERS / "plan.md").read_text(), re.MULTILINE)
    assert [week for week, _, _ in rows] == sorted(week for week, _, _ in rows)
    assert {week for week, _, _ in rows} == set("1234")
    heads = {
        path.name: re.search(r"\*Time:\*\s(.+?)(?:\s+hours)?[,.]", path.read_text()) for path in CHAPTERS.glob("*.md")
    }
    assert {file: spent for _, file, spent in rows} == {file: head[1] for file, head in heads.items() if head}


def test_every_page_and_notebook_is_in_the_table_of_contents_once() -> None:
    listed = [page for _, pages in contents() for page in pages]
    listed += [page for name in list(listed) for page in below(f"chapters/{name}")]
    assert len(listed) == len(set(listed))
    pages = {path.stem for path in CHAPTERS.glob("*.md")} - {"index"}
    assert pages | {f"{path.stem}-notebook" for path in CHAPTERS.glob("*.ipynb")} <= set(listed)


def test_terms_are_found_in_prose_in_singular_and_plural() -> None:
    known = {term.names[0]: term for term in terms()}
    assert known["continuous batching"].names == ("continuous batching", "in-flight batching")
    assert known["slot"].meaning == "The place of one token in the pool: page times page size, plus offset."
    assert len({term.anchor for term in terms()}) == len(known)
    pattern = known["page table"].pattern
    assert pattern is not None
    assert [bool(pattern.search(text)) for text in ("Page tables are", "a page table", "page-table", "tables")] == [
        True,
        True,
        False,
        False,
    ]
    assert known["step"].pattern is None


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="other.html#there">ok</a> <a href="https://example.org">ok</a> <img src="other.html">', None),
        ('<a href="none.html">', "page.html: no page none.html"),
        ('<a href="other.html#nowhere">', "page.html: no anchor other.html#nowhere"),
        ('<a href="#nowhere">', "page.html: no anchor #nowhere"),
        ('<img src="none.svg">', "page.html: no page none.svg"),
        ('<script src="https://cdn.example.org/x.js"></script>', "page.html: loads https://cdn.example.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/f.css">', "page.html: loads //fonts.example.org/f.css"),
    ],
)
def test_a_dead_link_and_an_asset_from_elsewhere_are_found(html: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<p id="there">')
    (tmp_path / "page.html").write_text(html)
    found = faults(tmp_path)
    assert [line.partition(" from elsewhere")[0] for line in found] == ([fault] if fault else [])


def test_markdown_that_is_left_in_the_text_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>a <code>`b`</code></p><pre>c ** d</pre><p>A figure. ``, and\nso on</p>")
    assert faults(tmp_path) == ["page.html: Markdown in its text: A figure. ``, and so on"]


def test_a_style_sheet_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "ok.css").write_text("a { background: url(icon.svg) }")
    (tmp_path / "bad.css").write_text('@import "https://fonts.example.org/f.css";')
    assert faults(tmp_path) == ["bad.css: loads from elsewhere"]
