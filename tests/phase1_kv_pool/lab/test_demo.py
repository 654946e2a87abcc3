import io
import itertools
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from phase1_kv_pool.lab import view
from phase1_kv_pool.lab.demo import main
from phase1_kv_pool.lab.page_map import Cell, PageMap, PageMapConfig, contiguous_runs
from phase1_kv_pool.lab.serving import SyntheticTrace
from tests.terminal import after_the_view, on_a_terminal

DEMO = [sys.executable, "-m", "phase1_kv_pool"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def after(steps: int, config: PageMapConfig | None = None) -> PageMap:
    page_map = PageMap(config or PageMapConfig())
    for _ in range(steps):
        page_map.step()
    return page_map


def drawn(page_map: PageMap, width: int, height: int, **options: object) -> list[str]:
    """What a terminal of this size would show, line by line, without the colours."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height, **options)  # type: ignore[arg-type]
    console.print(view.live(page_map, console))
    return ESCAPE.sub("", out.getvalue()).splitlines()


def test_the_cells_of_two_requests() -> None:
    trace = SyntheticTrace(num_requests=2, median_prompt=6, mean_answer=8, max_context=16, seed=0)
    page_map = after(1, PageMapConfig(pages=8, page_size=4, trace=trace))
    assert [one.prompt for one in trace.requests()] == [5, 3]
    full, one, three = Cell(0, 4), Cell(0, 1), Cell(1, 3)
    assert page_map.paged.cells() == [full, one, three, None, None, None, None, None]
    empty = [Cell(0, 0), Cell(0, 0)], [Cell(1, 0), Cell(1, 0), Cell(1, 0)]
    assert page_map.contiguous.cells() == [full, one, *empty[0], three, *empty[1]]
    # A cell has two columns: without colours its request and eighths from below, with colours sixteenths.
    plain = drawn(page_map, 80, 24, no_color=True)[view.ABOVE]
    assert plain.split() == [
        "0\u25880\u25821\u2586",
        *"\u00b7" * 5,
        "0\u25880\u25820\u25910\u25911\u25861\u25911\u25911\u2591",
    ]
    coloured = drawn(page_map, 80, 24, color_system="truecolor")[view.ABOVE]
    assert coloured.split() == [
        "\u2588\u2588\u258c",
        "\u2588\u258c\u00b7",
        *"\u00b7" * 4,
        "\u2588\u2588\u258c",
        "\u2588\u258c",
    ]


@pytest.mark.parametrize("steps", [1, 50, 120, 250])
def test_cells_agree_with_the_counts(steps: int) -> None:
    page_map = after(steps)
    for simulation in page_map.simulations:
        counts = simulation.counts()
        cells = [cell for cell in simulation.cells() if cell is not None]
        assert len(cells) == counts.used == page_map.config.pages - counts.free
        assert sum(cell.tokens for cell in cells) == counts.tokens
        assert sum(page_map.config.page_size - cell.tokens for cell in cells) == counts.wasted
        assert len({cell.owner for cell in cells}) == counts.running
        came = sum(one.arrival < steps for one in page_map.config.trace.requests())
        assert counts.running + counts.waiting + counts.done == came


def test_the_default_run_shows_the_gain_of_paging() -> None:
    """Far more requests at once, some preemptions, and fewer steps to the end."""
    page_map = PageMap(PageMapConfig())
    while page_map.going:
        page_map.step()
    assert 10 <= page_map.steps / page_map.config.steps_per_second <= 15
    page_map.finish()
    paged, contiguous = page_map.simulations
    total = page_map.config.trace.num_requests
    assert len(paged.simulator.done) == len(contiguous.simulator.done) == total
    assert contiguous.most_running == page_map.config.slots // page_map.config.trace.max_context
    assert paged.most_running > 3 * contiguous.most_running
    assert paged.simulator.steps < contiguous.simulator.steps
    assert paged.simulator.preemptions > 0 == contiguous.simulator.preemptions
    assert paged.utilisation > 0.9 > 0.5 > contiguous.utilisation


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (40, 12), (132, 43), (200, 60)])
@pytest.mark.parametrize("pages", [128, 2000])
def test_a_picture_fits_the_terminal(size: tuple[int, int], pages: int) -> None:
    width, height = size
    lines = drawn(after(80, PageMapConfig(pages=pages)), width, height, color_system="truecolor")
    assert len(lines) < height  # one line is left for the cursor
    assert max(len(line) for line in lines) <= width
    assert any("running in pages of 16" in line for line in lines)


def test_requests_have_symbols_without_colours() -> None:
    page_map = after(90)
    plain = "\n".join(drawn(page_map, 80, 24, no_color=True))
    for active in page_map.paged.simulator.running:
        symbol = view.SYMBOLS[active.spec.number % len(view.SYMBOLS)]
        pages = -(-active.tokens // 16)
        assert re.search(rf"{symbol}\u2588 {active.request.id} +{active.tokens} t +{pages} p", plain)
    assert "\u2591" in plain  # slots reserved and empty
    coloured = "\n".join(drawn(page_map, 80, 24, color_system="truecolor"))
    assert "\u2591" not in coloured


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--pages=0", "pages must be an integer from 1, got 0"),
        ("--pages=3", "pages must be at least 16 to hold 256 tokens, got 3"),
        ("--page-size=0", "page-size must be an integer from 1, got 0"),
        ("--page-size=48", "max-context must be a multiple of page-size"),
        ("--num-requests=0", "num-requests must be an integer from 1, got 0"),
        ("--arrival-rate=nan", "arrival-rate must be a number from 0, got nan"),
        ("--steps-per-second=0", "steps-per-second must be a number above 0, got 0.0"),
        ("--pages=many", "invalid int value: 'many'"),
    ],
)
def test_bad_options_are_named(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main([option])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_command_prints_a_few_pictures_when_piped() -> None:
    """Without waiting: at this rate a terminal would show it for an hour."""
    command = [*DEMO, "--steps-per-second", "0.1", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert len(re.findall(r"^step \d+   80 requests", done.stdout, re.MULTILINE)) == 3
    assert len(re.findall(r"\d+ slots wasted, \d+% of those used", done.stdout)) == 6
    *_, pages, blocks = done.stdout.splitlines()
    assert re.fullmatch(r"pages of 16 +\d+ +\d+ +\d+ +9\d\.\d% *", pages)
    assert re.fullmatch(r"blocks of 256 +8 +\d+ +0 +[345]\d\.\d% *", blocks)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.stdout == done.stdout


def test_ctrl_c_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(*DEMO, until=b"step 9 ")
    assert status == 130
    assert re.search(rb"Stopped at step \d+\.\r\n$", after_the_view(seen))
    assert after_the_view(seen).count(b"\n") <= 2
    assert b"Traceback" not in seen


def test_a_run_on_a_terminal_ends_with_the_summary() -> None:
    status, seen = on_a_terminal(*DEMO, "--steps-per-second", "1000", "--num-requests", "20")
    assert status == 0
    assert b"20 requests, 2,048 slots: 128 pages of 16" in after_the_view(seen)


@given(st.lists(st.integers(0, 30), max_size=20))
def test_contiguous_runs_are_maximal_and_keep_the_order(pages: list[int]) -> None:
    pieces = contiguous_runs(pages)
    assert [page for first, n in pieces for page in range(first, first + n)] == pages
    assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(pieces))
