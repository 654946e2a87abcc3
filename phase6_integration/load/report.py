"""The figures of a run, named as `vllm bench serve` names them, as JSON or as a table."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase6_integration.load.response import Outcome
from phase6_integration.load.workload import Workload

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between deliveries",
    "e2el": "end to end",
}
LATENESS = {"lateness": "sent after the plan"}
STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")
SHOWN = ("mean", "std", "p50", "p90", "p99")  # the median is p50


@dataclass(frozen=True, slots=True)
class SLO:
    """Upper limits, in milliseconds, that a request must keep to count as goodput. `itl` limits the request's mean."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None

    @classmethod
    def of(cls, pairs: Sequence[str]) -> "SLO":
        """Read `ttft:500` and the like."""
        limits: dict[str, float] = {}
        for pair in pairs:
            name, _, value = pair.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in LATENCIES or not 0 < limit < math.inf or name in limits:
                raise ValueError(f"an SLO is one of {', '.join(LATENCIES)}, a colon and milliseconds, got {pair!r}")
            limits[name] = limit
        return cls(**limits)

    @property
    def given(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in LATENCIES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def needs_stream(self) -> bool:
        return bool(self.given.keys() - {"e2el"})

    def kept(self, outcome: Outcome) -> bool:
        """Whether a request kept all limits. A latency that it lacks, such as the TPOT of one token, counts as kept."""
        itl = outcome.itl
        values = {
            "ttft": outcome.ttft,
            "tpot": outcome.tpot,
            "itl": sum(itl) / len(itl) if itl else math.nan,
            "e2el": outcome.e2el,
        }
        return not any(values[name] * 1e3 > limit for name, limit in self.given.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of a run. Failed requests count in `failed` only. A latency without measurements is None, and so is
    goodput without an SLO."""

    model_id: str
    num_prompts: int
    request_rate: float
    max_concurrency: int | None
    seed: int  # of the workload
    burstiness: float
    duration: float  # seconds, from the first request to the last end
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    latencies: dict[str, float | None]  # mean_ttft_ms and so on
    errors: dict[str, int]  # why, and how often
    outcomes: Sequence[Outcome]
    start: float
    slo: SLO

    def as_json(self) -> dict[str, Any]:
        """One flat object. The names are vLLM's, except `seed`, `total_cached_tokens` and the lateness."""
        names = [name for name in self.__slots__ if name not in ("latencies", "errors", "outcomes", "start", "slo")]
        figures = {name: getattr(self, name) for name in names} | self.latencies
        return figures | {"request_rate": "inf" if math.isinf(self.request_rate) else self.request_rate}

    def table(self) -> RenderableType:
        """A table for people."""
        counts, times = Table.grid(padding=(0, 2, 0, 0)), Table(box=None, pad_edge=False, header_style="dim")
        counts.add_column()
        counts.add_column(justify="right")
        rows = {
            "requests completed": f"{self.completed:,}",
            "requests failed": f"{self.failed:,}",
            "seconds": f"{self.duration:,.2f}",
            "tokens in": f"{self.total_input_tokens:,}",
            "of these cached": f"{self.total_cached_tokens:,}",
            "tokens out": f"{self.total_output_tokens:,}",
            "requests/s": f"{self.request_throughput:,.2f}",
            "goodput, requests/s": "" if self.request_goodput is None else f"{self.request_goodput:,.2f}",
            "tokens out/s": f"{self.output_throughput:,.1f}",
            "tokens in and out/s": f"{self.total_token_throughput:,.1f}",
            "--seed of these prompts": f"{self.seed}",
        }
        for name, value in rows.items():
            if value:
                counts.add_row(name, value, style="red" if name == "requests failed" and self.failed else None)
        times.add_column("milliseconds")
        for statistic in SHOWN:
            times.add_column(statistic, justify="right")
        for row in self.measured:
            times.add_row(*row)
        failures = [Text(f"{count} x {why}", "red") for why, count in Counter(self.errors).most_common(5)]
        late = [Text(self.late, "yellow")] if self.late else []
        return Group(counts, "", times, *late, *failures)

    @property
    def measured(self) -> list[list[str]]:
        """Rows of a table: the name of each latency that was measured, and its statistics."""
        rows = []
        for short, name in (LATENCIES | LATENESS).items():
            values = [self.latencies[f"{statistic}_{short}_ms"] for statistic in SHOWN]
            if values[0] is not None:
                rows.append([f"{name} ({short})", *(f"{value:,.2f}" for value in values)])
        return rows

    @property
    def late(self) -> str:
        """A warning if the client was behind its schedule by more than a tenth of what it measured."""
        late, seen = self.latencies["p90_lateness_ms"], self.latencies["p50_ttft_ms"] or self.latencies["p50_e2el_ms"]
        if not late or not seen or late < 0.1 * seen:
            return ""
        return (
            f"One request in ten was sent {late:,.1f} ms late or more: latencies are also the client's, or its limit's."
        )


def report(
    outcomes: Sequence[Outcome],
    start: float,
    slo: SLO,
    model: str,
    workload: Workload,
    concurrency: int | None,
) -> Report:
    """Compute the figures of a run that began at `start`."""
    whole = [outcome for outcome in outcomes if outcome.error is None]
    tokens_in = sum(outcome.input_tokens for outcome in whole)
    tokens_out = sum(outcome.output_tokens for outcome in whole)
    duration = max((outcome.ended for outcome in outcomes), default=start) - start
    seconds = max(duration, 1e-9)
    latencies: dict[str, float | None] = {}
    for name in LATENCIES | LATENESS:
        measured = [getattr(outcome, name) for outcome in whole]
        values = [gap for gaps in measured for gap in gaps] if name == "itl" else measured
        latencies |= statistics(name, [value for value in values if not math.isnan(value)])
    return Report(
        model_id=model,
        num_prompts=len(outcomes),
        request_rate=workload.request_rate,
        max_concurrency=concurrency,
        seed=workload.seed,
        burstiness=workload.burstiness,
        duration=duration,
        completed=len(whole),
        failed=len(outcomes) - len(whole),
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        total_cached_tokens=sum(outcome.cached_tokens for outcome in whole),
        request_throughput=len(whole) / seconds,
        output_throughput=tokens_out / seconds,
        total_token_throughput=(tokens_in + tokens_out) / seconds,
        request_goodput=sum(map(slo.kept, whole)) / seconds if slo.given else None,
        latencies=latencies,
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        outcomes=outcomes,
        start=start,
        slo=slo,
    )


def statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """mean_<name>_ms and so on. The standard deviation is the population's."""
    if not seconds:
        return {f"{statistic}_{name}_ms": None for statistic in STATISTICS}
    values = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    found = float(values.mean()), p50, float(values.std()), p50, p90, p99
    return {f"{statistic}_{name}_ms": value for statistic, value in zip(STATISTICS, found, strict=True)}
