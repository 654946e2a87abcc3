"""Terminal output of the demo: a live table of requests, then the results and latency percentiles."""

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase0_request.lab.clients import Demo, DemoClient
from phase0_request.metrics import Summary, percentile
from phase0_request.request import FinishReason, RequestState

_STATE_STYLE = {
    RequestState.WAITING: palette.WAITING,
    RequestState.RUNNING: palette.DECODE,
    RequestState.PREEMPTED: palette.PREEMPTED,
    RequestState.FINISHED: palette.ENDED,
}
_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


def live(demo: Demo, width: int, height: int) -> RenderableType:
    """The live view: one row for each request, as many as fit the terminal."""
    batcher = demo.server.batcher
    question_width = max(12, min(36, width // 4))
    answer_width = max(12, width - question_width - 30)
    table = _table()
    table.add_column("#", justify="right", width=4, style="dim")
    table.add_column("state", width=9)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("question", width=question_width, no_wrap=True, overflow="ellipsis")
    table.add_column("answer", width=answer_width, no_wrap=True)
    arrived = [(n, c) for n, c in enumerate(demo.clients, 1) if c.request is not None or c.refusal is not None]
    for number, client in _in_view(arrived, max(height - 4, 3)):
        tokens = len(client.request.output_tokens) if client.request else 0
        table.add_row(
            str(number), _state(client), str(tokens), Text(client.question), Text(_tail(client.answer, answer_width))
        )
    running, limit = len(batcher.running), batcher.batch_size
    bar = [("\u25a0" * running, palette.DECODE), ("\u25a1" * (limit - running), "dim")] if limit <= width // 2 else []
    counts = f" {running} of {limit}   waiting {len(batcher.waiting)}   step {demo.server.core.steps}"
    head = Text.assemble("running ", *bar, counts, overflow="ellipsis", no_wrap=True)
    return Group(head, Text(), table)


def results(demo: Demo, width: int) -> Table:
    """A table of all requests after the run."""
    table = _table("Requests, times in milliseconds")
    table.add_column("#", justify="right", width=4, style="dim")
    table.add_column("question", width=max(12, min(48, width - 62)), no_wrap=True, overflow="ellipsis")
    for name, room in (("in", 3), ("out", 4), ("end", 7), ("queue", 6), ("TTFT", 6), ("ITL", 5), ("total", 6)):
        table.add_column(name, justify="left" if name == "end" else "right", width=room, no_wrap=True)
    for number, client in enumerate(demo.clients, 1):
        request = client.request
        if request is None:
            table.add_row(str(number), Text(client.question), "", "", _state(client))
            continue
        times = request.times
        mean_itl = sum(times.itl) / len(times.itl) if times.itl else None
        table.add_row(
            str(number),
            Text(client.question),
            str(len(request.prompt_tokens)),
            str(len(request.output_tokens)),
            _state(client),
            *(_ms(t) for t in (times.queue_time, times.ttft, mean_itl, times.e2e)),
        )
    return table


def figures(summary: Summary) -> RenderableType:
    """Throughput and latency percentiles of the run."""
    head = (
        f"{summary.requests} requests, {summary.tokens} tokens in {summary.seconds:.2f} s: "
        f"{summary.tokens_per_second:.0f} tokens/s, {summary.requests_per_second:.1f} requests/s"
    )
    table = _table()
    table.add_column("milliseconds")
    for q in ("p50", "p90", "p99"):
        table.add_column(q, justify="right", min_width=7)
    for name, values in (
        ("time in the queue", summary.queue),
        ("time to first token (TTFT)", summary.ttft),
        ("between tokens (ITL)", summary.itl),
        ("end to end", summary.e2e),
    ):
        table.add_row(name, *(_ms(percentile(values, q)) for q in (50, 90, 99)))
    return Group(Text(head, "bold"), table)


def _table(title: str | None = None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def _state(client: DemoClient) -> Text:
    request = client.request
    if request is None:
        return Text("refused", palette.FAULT)
    if request.state is RequestState.FINISHED and request.finish_reason is not None:
        return Text(request.finish_reason.value, palette.ENDED if request.finish_reason in _ENDED else palette.FAULT)
    return Text(request.state.value, _STATE_STYLE[request.state])


def _in_view(rows: Sequence[tuple[int, DemoClient]], room: int) -> Iterable[tuple[int, DemoClient]]:
    """The rows that fit: unfinished requests first, then the latest finished ones, in order of arrival."""
    ended = [row for row in rows if row[1].request is None or row[1].request.finished]
    going = [row for row in rows if row not in ended][:room]
    return sorted([*going, *ended[len(ended) - max(room - len(going), 0) :]], key=lambda row: row[0])


def _tail(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else "\u2026" + line[1 - length :]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None or math.isnan(seconds) else f"{seconds * 1000:.1f}"
