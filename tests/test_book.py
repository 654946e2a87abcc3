"""The book: listings, figures, charts, notebooks and links."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from chapters import charts
from chapters.claims import ClaimError
from chapters.cli import main as chapters
from chapters.course import Course
from chapters.drawings.catalog import DRAWINGS
from chapters.elsewhere import PAGE, lines, moved
from chapters.exercises import answer_lines, every, load
from chapters.ledger import ENTRIES, FIGURE
from chapters.notebooks import NotebookError, execute
from chapters.plan import PAGES
from chapters.predictions import MARK, asked
from chapters.tables import quoted

ROOT = Path(__file__).parent.parent
CHAPTERS = ROOT / "chapters"
NOTEBOOKS = sorted(CHAPTERS.glob("*.ipynb"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(CHAPTERS.glob("*.md"))]


def test_listings_and_numbers_are_what_their_sources_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert chapters(["weave", "--check"]) == 0, capsys.readouterr().out


ITEM = re.compile(r"( *)(?:([-+*>])|\d{1,9}[.)]) ")


def items_by_accident(markdown: str) -> list[str]:
    """Lines that begin like an item of a list, or a quote, within a paragraph or an item of another kind."""
    prose, found = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL), []
    for first, *rest in (block.split("\n") for block in re.split(r"\n\s*\n", prose.strip("\n"))):
        begun = ITEM.match(first)
        kinds = [(item and item.groups(), line) for line in rest if (item := ITEM.match(line))]
        found += [line for kind, line in kinds if begun is None or kind != begun.groups()]
    return found


def test_a_line_that_is_wrapped_before_a_number_or_a_sign_is_no_item() -> None:
    assert items_by_accident("- one\n  more\n- two\n\n1. one\n2. two\n\n```\na\n- b\n```\n\na-\n-b\n1.5") == []
    assert items_by_accident("not even with\n0. Query\n\n- one\n  + two\n1. 3") == ["0. Query", "  + two", "1. 3"]


@pytest.mark.parametrize("text", [*TEXTS, *sorted(CHAPTERS.glob("*.toml"))], ids=lambda p: p.name)
def test_no_line_of_prose_becomes_an_item_of_a_list_or_html(text: Path) -> None:
    markdown = text.read_text(encoding="utf-8")
    assert items_by_accident(markdown) == []
    assert "\n<!-- measured" not in markdown, "Markdown takes the rest of such a paragraph for HTML"
    assert not re.search(r"^\|.*<!-- measured: [\w-]+\.json", markdown, re.MULTILINE), (
        "a table has one marker: tables.py"
    )


def pages(chapter: int) -> list[Path]:
    return sorted(path for path in CHAPTERS.glob(f"{chapter:02d}_*.md") if "appendix" not in path.name)


@pytest.mark.parametrize("chapter", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_every_chapter_has_its_parts(chapter: int) -> None:
    text = "\n".join(path.read_text() for path in pages(chapter))
    for part in ("The problem", "The idea", "What to try", "Exercises", "What real engines do", "Further reading"):
        assert re.search(rf"^## {part}", text, re.MULTILINE), f"chapter {chapter} lacks '{part}'"
    assert len(re.findall(r"^\| \d+\.\d+ \|", text, re.MULTILINE)) >= 3
    assert list(CHAPTERS.glob(f"{chapter:02d}_*.ipynb"))


@pytest.mark.parametrize("chapter", Course.here().chapters_with("exercises"))
def test_a_chapter_has_each_answer_once_and_a_page_says_about_how_many_lines_it_asks_for(chapter: int) -> None:
    course = Course.here()
    exercises = {exercise.id: exercise for exercise in load(course, chapter)}
    answered: list[str] = []
    for path in pages(chapter):
        text = path.read_text(encoding="utf-8")
        answers = re.search(r"^## Answers\n\n(?:.+\n\n)?<!-- answers: (.+) -->$", text, re.MULTILINE)
        here = answers[1].split() if answers and "." in answers[1] else list(exercises) if answers else []
        if not here:
            continue
        answered += here
        said = re.search(r"^\*You write\* about (\d+) lines", text, re.MULTILINE)
        assert said is not None, path.name
        lines = sum(answer_lines(course.root, exercises[id]) for id in here)
        assert abs(int(said[1]) - lines) < lines / 12, f"{path.name}: {lines} lines"
    assert sorted(answered) == sorted(exercises)


def test_the_plan_has_every_page_and_seven_evenings_of_at_most_four_hours() -> None:
    written = {path.stem for path in [*CHAPTERS.glob("[0-9][0-9]_*.md"), CHAPTERS / "capstone.md"]}
    there = [page for page in PAGES if page.path.exists()]
    assert {page.name for page in there} == {name for name in written if "appendix" not in name}
    evenings = [page.evening for page in PAGES if page.evening]
    assert (evenings, set(evenings)) == (sorted(evenings), set(range(1, 8)))
    core = {f"{each.chapter:02d}" for each in every(Course.here()) if each.core}
    assert {page.name[:2] for page in there if page.evening} == core
    hours = [sum(page.hours + page.minutes / 60 for page in there if page.evening == each) for each in range(1, 8)]
    assert max(hours) <= 4
    assert f"in seven evenings, about {round(sum(hours))} hours" in (CHAPTERS / "plan.md").read_text()
    assert all("seven evenings" in text.read_text() for text in (ROOT / "README.md", CHAPTERS / "index.md"))


@pytest.mark.parametrize("chapter", range(2, 7))
def test_a_chapter_asks_for_a_guess_before_it_shows_what_was_measured(chapter: int) -> None:
    texts = {path.stem: path.read_text() for path in CHAPTERS.glob(f"{chapter:02d}_*.md")}
    guesses = [(each, page) for page, text in texts.items() for each in asked(text, CHAPTERS / "results")]
    assert guesses
    assert len(guesses) == sum(map(len, map(MARK.findall, texts.values()))), "a guess is a question and what is folded"
    for each, page in guesses:
        assert re.fullmatch(r"\*\*Guess:\*\* .*\?\n", each.question, re.DOTALL), each.key
        assert each.key not in quoted(each.above + each.question, CHAPTERS, page), (
            f"{each.key} is told before it is asked"
        )
        assert "![" in each.folded or each.key in quoted(each.folded, CHAPTERS, page), f"{each.key} is not folded"


def test_a_guess_is_about_the_figure_as_it_is_shown() -> None:
    mark = (
        "<!-- guess: stall.json#{} -->\n**Guess:** how much?\n\n<details>\n<summary>Shown</summary>\n\nx\n</details>\n"
    )
    (gap,) = asked(mark.format("outcomes.whole.worst_gap_ms ,.0f ms"), CHAPTERS / "results")
    (share,) = asked(mark.format("outcomes.chunk_64.longer .0%"), CHAPTERS / "results")
    assert (f"{gap.number:,.0f} ms", f"{share.number:.0f}%") == (gap.shown, share.shown)
    with pytest.raises(ClaimError, match="no number or text at 'nothing'"):
        asked(mark.format("nothing d"), CHAPTERS / "results")


@pytest.mark.parametrize("text", TEXTS, ids=lambda p: p.name)
def test_every_link_to_a_file_leads_to_one(text: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text.read_text(), flags=re.MULTILINE | re.DOTALL)  # a[i](b) is no link in code
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (text.parent / link).exists()] == []


@pytest.mark.parametrize("name", list(charts.CHARTS))
def test_charts_are_drawn_from_the_figures_that_are_there(name: str, tmp_path: Path) -> None:
    assert charts.fingerprint(name) in (charts.FIGURES / name).read_text(), "run python -m chapters.charts"
    assert "<path" in charts.draw(name, figures=tmp_path).read_text()


def test_the_map_lists_files_after_those_that_they_import() -> None:
    parts = re.findall(r"<details>(.*?)</details>", (CHAPTERS / "map.md").read_text(), re.DOTALL)
    assert len(parts) == 8
    for part in parts:
        files = re.findall(r"^\| \[\w+\]\(\.\./(phase[\w/]+)\.py\) \|", part, re.MULTILINE)
        assert len(files) > 2
        for number, file in enumerate(files):
            imported = re.findall(r"^from (\S+) import", (ROOT / f"{file}.py").read_text(), re.MULTILINE)
            assert {name.replace(".", "/") for name in imported}.isdisjoint(files[number + 1 :]), file


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_show_what_the_code_does_now(name: str) -> None:
    assert DRAWINGS[name]().svg() == (charts.FIGURES / name).read_text(), "run python -m chapters.charts"


@pytest.mark.parametrize("figure", sorted(charts.FIGURES.glob("*.svg")), ids=lambda p: p.name)
def test_figures_have_colours_for_dark_mode_and_are_used(figure: Path) -> None:
    assert "prefers-color-scheme:dark" in figure.read_text()
    assert any(f"figures/{figure.name})" in text.read_text() for text in TEXTS), "no chapter shows it"


@pytest.mark.parametrize(("text", "least"), [("glossary.md", 30), ("map.md", 15)])
def test_every_name_that_a_table_links_is_in_its_file(text: str, least: int) -> None:
    rows = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", (CHAPTERS / text).read_text())
    assert len(rows) > least
    named = [(name, part, CHAPTERS / file) for name, file in rows for part in name.split(".")]
    missing = [name for name, part, file in named if part not in (file.stem, *re.findall(r"\w+", file.read_text()))]
    assert missing == []


def test_the_ledger_says_of_each_optimization_what_it_gains_and_where_it_loses() -> None:
    assert len(ENTRIES) >= 8
    for entry in ENTRIES:
        assert FIGURE.search(entry.gain), f"{entry.name}: a gain that nobody measured"
        assert entry.loses, entry.name
        assert entry.trap, entry.name
        assert 20 < entry.lines < 2000, f"{entry.name} has {entry.lines} lines"


def test_the_same_line_elsewhere_is_pinned_and_a_line_that_has_moved_is_named() -> None:
    pinned = list(lines(page := PAGE.read_text()))
    assert {line.repository.split("/")[1] for line in pinned} == {"vllm", "sglang", "llama.cpp"}
    assert len(pinned) > 3 * 12

    def read(url: str) -> str:
        here = [line for line in pinned if line.raw == url]
        rows = {line.number: line.name or "a line" for line in here}
        return "\n".join(rows.get(number, "") for number in range(1, max(rows) + 1))

    assert moved(page, read) == []
    last = pinned[-1]
    wrong = moved(page, lambda url: "\n" + read(url) if url == last.raw else read(url))
    assert f"{last.path}:{last.number} should be {last.text}: ''" in wrong
    with pytest.raises(ValueError, match="not pinned"):
        list(lines("[`step`][a]\n\n[a]: https://github.com/vllm-project/vllm/blob/main/core.py#L1\n"))


def test_every_result_names_what_it_depends_on() -> None:
    results = sorted((CHAPTERS / "results").glob("*.json"))
    assert results
    for file in results:
        result = json.loads(file.read_text())
        for key in ("device", "machine", "versions", "commit", "command", "date", "figures"):
            assert result[key], f"{file.name} does not name its {key}"
        assert not result["commit"].endswith("-dirty"), f"{file.name} was measured on code that is in no commit"


# Less work for each notebook: a cell before the others, and texts of its cells that are replaced.
SHORT_CEILINGS = """
from phase1_kv_pool.lab import timing
from phase2_prefill_decode.lab import ceilings
timing.SECONDS, ceilings.SIZES, ceilings.OUT_OF_CACHE = 0.01, {"cpu": (256,)}, {"cpu": 32 << 20}
"""
SHALLOW = """
from dataclasses import replace
from phase2_prefill_decode.lab.shapes import SHAPES
SHAPES["17m"] = replace(SHAPES["17m"], num_hidden_layers=1, layers=())
"""
FEWER = {
    "00_request": (
        "from phase0_request.lab import bench\nbench.batching.__defaults__ = (32, None)",
        {"count=150": "count=50", "[0.5, 1, 2, 3, 4, 5, 6, 8, 10]": "[0.5, 10]"},
    ),
    "01_kv_pool": ("", {"study(SyntheticTrace(),": "study(SyntheticTrace(num_requests=400),"}),
    "02_prefill_decode": (
        f"{SHORT_CEILINGS}{SHALLOW}\nfrom phase2_prefill_decode.lab import phases\n"
        "phases.PROMPTS, phases.BATCHES, phases.CONTEXTS, phases.SECONDS = (1, 16, 64), (1, 64), (64, 256), 0.01",
        {"(1, 2, 4, 8, 16, 32, 64, 128, 256)": "(1, 256)", "range(5)": "range(1)"},
    ),
    "03_chunked_prefill": (
        f"{SHORT_CEILINGS}{SHALLOW}",
        {"8, 32, 96, 16, 2048": "8, 32, 40, 16, 300", "range(2)": "range(1)"},
    ),
    "04_radix": (
        f"{SHALLOW}from phase4_radix.lab import replay\n"
        "replay.CHAT_PAGES, replay.GROUP_PAGES = (192, 4096), (40, 88, 128)\n"
        "replay.chats.__defaults__, replay.pressure.__defaults__ = (replay.CHAT_PAGES,), (replay.GROUP_PAGES,)",
        {"(0, 128, 256, 384, 512), 3": "(0, 512), 1", "(8, 64)": "(2, 4)"},
    ),
    "05_continuous": (
        f"{SHORT_CEILINGS}{SHALLOW}",
        {
            "(10, 20, 40, 80, 120, 160, 240)": "(5, 20)",
            "seconds=2": "seconds=1",
            "(20, 40, 80, 160)": "(5,)",
            "(20, 40, 80, 120, 160, 240)": "(5, 20)",
        },
    ),
    "06_integration": (
        "",
        {
            "(1, 2, 4, 8, 16, 32, 64)": "(1, 64)",
            "max(8, 2 * clients)": "max(4, clients // 4)",
            "output_len=32": "output_len=8",
            "output_len=96": "output_len=16",
        },
    ),
    "07_fast": ("", {"(1, 8, 32, 64, 128, 256)": "(1, 256)"}),
    "08_constrained": (
        "import sys\nsys.modules['rfc3987_syntax'] = None  # see conftest.py\n"
        "from phase5_continuous.lab import constrained\n"
        "constrained.asked.__defaults__, constrained.mask_us.__defaults__ = (1.0, 32), (1,)",
        {
            "(4096, 16_384, 65_536)": "(4096, 8192)",
            "params, 16) for way, params in asked().items()": "params, 4) for way, params in asked().items()",
            "params, 16) for way, params in asked(temp": "params, 4) for way, params in asked(temp",
        },
    ),
    "09_fits_in_memory": (
        "from phase1_kv_pool.lab import timing\nfrom phase2_prefill_decode.lab import rows\n"
        "timing.SECONDS, rows.OUTPUTS, rows.INPUTS = 0.01, 512, 256",
        {"(2, 3, 4, 6, 8)": "(4, 8)", "held_out(read())[:10]": "held_out(read())[:2]"},
    ),
    "11_speculation": (
        "",
        {
            "range(300)": "range(60)",
            "(1, 4, 16)": "(1, 2, 3)",
            "(0.0, 0.3, 0.6, 0.8, 0.9, 1.0)": "(0.5, 1.0)",
            "range(6)": "range(1)",
        },
    ),
    "12_scale": ("", {"= 50_000": "= 20_000", "(1, 2, 4, 8)": "(1, 8)", "(0.1, 1, 10, 60)": "(1, 60)"}),
    "colab": (SHALLOW, {}),
}
BETWEEN = """%reset -f
import gc
import matplotlib.pyplot as plt
plt.close("all")
plt.rcdefaults()
gc.freeze()
"""


def joined(notebooks: Sequence[Path]) -> tuple[Any, list[str]]:
    """One notebook of all, shortened as FEWER says, each in an empty namespace; and where each cell comes from."""
    whole, places = nbformat.v4.new_notebook(), []
    for path in notebooks:
        first, replaced = FEWER.get(path.stem, ("", {}))
        sources = [BETWEEN, first, *(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code")]
        for long, short in replaced.items():
            assert sum(source.count(long) for source in sources) == 1, f"{path.name}: {long}"
            sources = [source.replace(long, short) for source in sources]
        whole.cells += [nbformat.v4.new_code_cell(source) for source in sources]
        places += [f"{path.name}, code cell {number}" for number in range(-1, len(sources) - 1)]
    return whole, places


def test_notebooks_run(tmp_path: Path) -> None:
    """In one kernel, each with an empty namespace: to start a kernel with torch takes longer than most of them."""
    whole, places = joined(NOTEBOOKS)
    nbformat.write(whole, tmp_path / "all.ipynb")
    try:
        done = execute(tmp_path / "all.ipynb")
    except NotebookError as error:
        (number,) = re.findall(r"all.ipynb, cell (\d+)", str(error))
        raise AssertionError(f"{places[int(number) - 1]}: {error}") from error
    outputs = {place: cell.get("outputs", ()) for place, cell in zip(places, done.cells, strict=True)}
    assert {place.split(",")[0] for place, told in outputs.items() if told} == {path.name for path in NOTEBOOKS}
    kinds = {place: {one.get("name", one["output_type"]) for one in told} for place, told in outputs.items()}
    assert [place for place, found in kinds.items() if found & {"error", "stderr"}] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_kept_with_their_outputs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in o.get("data", {}) for cell in cells for o in cell["outputs"])
