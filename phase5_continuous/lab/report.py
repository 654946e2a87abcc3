"""Tables that compare several ways to serve."""

from collections.abc import Sequence

from rich.table import Table

from phase5_continuous.lab.stats import Outcome

NAME = 14  # columns for the longest name of a way
COLUMNS = (
    "tokens\n/s",
    "goodput\n/s",
    "met\nSLO",
    "TTFT\np50",
    "TTFT\np99",
    "ITL\np50",
    "ITL\np99",
    "longest\nwait",
    "\nfair",
)
EVENTS = ("preemptions", "refused", "failed")


def table(outcomes: dict[str, Outcome]) -> Table:
    """One row for each way; times in milliseconds."""
    rows = {}
    for way, o in outcomes.items():
        times = [1e3 * seconds for seconds in (o.ttft_p50, o.ttft_p99, o.itl_p50, o.itl_p99, o.queue_max)]
        rows[way] = [
            f"{o.tokens_per_second:,.0f}",
            f"{o.goodput:,.1f}",
            f"{o.attainment:.0%}",
            *(f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" for ms in times),
            f"{o.fairness:.2f}",
        ]
    return side_by_side("times\nin ms", COLUMNS, rows)


def events(outcomes: dict[str, Outcome]) -> Table | None:
    """Counts of preemptions, refusals and failures, one row for each way. Columns of zeros are left out."""
    names = [name for name in EVENTS if any(getattr(o, name) for o in outcomes.values())]
    rows = {way: [f"{getattr(o, name):,}" for name in names] for way, o in outcomes.items()}
    return side_by_side("", names, rows) if names else None


def side_by_side(corner: str, columns: Sequence[str], rows: dict[str, list[str]]) -> Table:
    """A table with one row for each way."""
    drawn = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column(corner, no_wrap=True, min_width=NAME)
    for name in columns:
        drawn.add_column(name, justify="right", no_wrap=True)
    for way, cells in rows.items():
        drawn.add_row(way, *cells)
    return drawn
