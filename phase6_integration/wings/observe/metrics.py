"""Prometheus metrics under the names of vLLM, and the same numbers as JSON for /stats.

`Metrics` is an observer of the engine. Gauges and the engine's own counters are read from its latest update on demand.
No label takes a value from a client, so memory does not grow with the number of requests.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from phase0_request.request import FinishReason
from phase6_integration.api.state import ServerState
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.async_engine import AsyncEngine, StepReport
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import OutputState
from phase6_integration.wings.observe.logs import dropped_lines

disable_created_metrics()  # type: ignore[no-untyped-call]  # vLLM has none

LABELS = ("model_name", "engine")
WINDOW = 60  # seconds of a rate
KEPT = 4096  # values of which percentiles are made
QUANTILES = (50, 90, 99)
CHOICES = [1.0, 2.0, 5.0, 10.0, 20.0]
STEP = [float(1), *(float(8 << i) for i in range(12))]  # tokens
# Bounds in seconds, as vLLM has them: dashboards of several servers can then be laid over each other.
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
TTFT += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75]
TOKEN += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
REQUEST = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0]
REQUEST += [30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
GAUGES: tuple[tuple[str, str, Callable[[Gauges], float]], ...] = (
    ("num_requests_running", "Requests that take part in steps.", lambda g: g.running),
    ("num_requests_waiting", "Requests that wait for room, preempted ones among them.", lambda g: g.waiting),
    ("kv_cache_usage_perc", "The share of the pages that running requests hold, 0 to 1.", lambda g: g.usage),
)
COUNTERS: tuple[tuple[str, str, Callable[[Gauges], float]], ...] = (
    (
        "num_preemptions",
        "Times that a request lost its pages and was computed again.",
        lambda g: g.preemptions,
    ),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda g: g.query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda g: g.hit_tokens),
)


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [step for step in steps if step <= most]


class Rate:
    """A rate per second over the last WINDOW whole seconds, from one sum for each of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = int(clock())
        self._sums: deque[tuple[int, float]] = deque()  # second, sum of it; the oldest first

    def add(self, amount: float) -> None:
        second = int(self._clock())
        if self._sums and self._sums[-1][0] == second:
            amount += self._sums.pop()[1]
        self._sums.append((second, amount))
        self._forget(second)

    def per_second(self) -> float:
        now = int(self._clock())
        self._forget(now)
        seconds = min(WINDOW, now - self._start)
        return sum(amount for second, amount in self._sums if second < now) / seconds if seconds else 0.0

    def _forget(self, now: int) -> None:
        while self._sums and self._sums[0][0] < now - WINDOW:
            self._sums.popleft()


class Latencies:
    """The last KEPT values of one latency, in seconds."""

    def __init__(self) -> None:
        self._values = array("d")
        self._oldest = 0  # where the next value goes, once there are KEPT

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            if len(self._values) < KEPT:
                self._values.append(value)
            else:
                self._values[self._oldest] = value
                self._oldest = (self._oldest + 1) % KEPT

    def quantiles(self) -> dict[str, float | None]:
        """Percentiles by name; None without values."""
        values = self._values
        return {f"p{q}": round(float(np.percentile(values, q)), 6) if values else None for q in QUANTILES}


class Metrics:
    """Observes an engine. `exposition` is for Prometheus, `stats` for people."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        gauges: Callable[[], Gauges],
        clock: Callable[[], float] = time.monotonic,
        *,
        up: Callable[[], bool] = lambda: True,
        restarts: Callable[[], int] = lambda: 0,
        cache: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`cache`: what is known of the KV cache, by label; nothing until the engine is ready."""
        self._labels = (model_name, "0")
        self._gauges, self._up, self._restarts, self._cache = gauges, up, restarts, cache
        self._clock = clock
        self._start = clock()
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        lengths = one_two_five(max(max_model_len, 1))
        self.registry = CollectorRegistry()
        self.registry.register(self)
        buckets = {
            "time_to_first_token_seconds": TTFT,
            "inter_token_latency_seconds": TOKEN,
            "request_time_per_output_token_seconds": TOKEN,
            "e2e_request_latency_seconds": REQUEST,
            "request_queue_time_seconds": REQUEST,
            "request_prefill_time_seconds": REQUEST,
            "request_decode_time_seconds": REQUEST,
            "request_inference_time_seconds": REQUEST,
            "request_prompt_tokens": lengths,
            "request_generation_tokens": lengths,
            "request_max_num_generation_tokens": lengths,
            "request_params_max_tokens": lengths,
            "request_params_n": CHOICES,
            "iteration_tokens_total": STEP,
        }
        self._histograms = {name: self._histogram(name, bounds) for name, bounds in buckets.items()}
        self._rates = {name: Rate(clock) for name in ("prefill_tokens", "decode_tokens", "requests")}
        self._latencies = {name: Latencies() for name in ("ttft", "itl", "e2e", "queue")}

    def _histogram(self, name: str, bounds: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        histogram = Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=bounds)
        return histogram.labels(*self._labels)

    # Called by the engine.

    def stepped(self, report: StepReport) -> None:
        self._prompt_tokens += report.prompt_tokens
        self._cached_tokens += report.cached_tokens
        self._generation_tokens += report.generated
        if tokens := report.prefill_tokens + report.generated:
            self._histograms["iteration_tokens_total"].observe(tokens)
            self._rates["prefill_tokens"].add(report.prefill_tokens)
            self._rates["decode_tokens"].add(report.decode_tokens)

    def finished(self, request: EngineRequest, state: OutputState, reason: FinishReason) -> None:
        """Latencies are of requests that were completed."""
        self._finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._served(request, state)

    def _served(self, request: EngineRequest, state: OutputState) -> None:
        times, into = state.times, self._histograms
        into["request_prompt_tokens"].observe(len(request.prompt))
        into["request_generation_tokens"].observe(state.generated)
        into["request_params_max_tokens"].observe(request.params.max_tokens)
        gaps = times.itl
        for gap in gaps:
            into["inter_token_latency_seconds"].observe(gap)
        self._latencies["itl"].extend(gaps)
        per_token = times.decode / len(gaps) if times.decode is not None and gaps else None
        for name, lately, seconds in (
            ("time_to_first_token_seconds", "ttft", times.ttft),
            ("e2e_request_latency_seconds", "e2e", times.e2e),
            ("request_queue_time_seconds", "queue", times.queue_time),
            ("request_prefill_time_seconds", None, times.prefill),
            ("request_decode_time_seconds", None, times.decode),
            ("request_inference_time_seconds", None, times.inference),
            ("request_time_per_output_token_seconds", None, per_token),
        ):
            if seconds is not None:
                into[name].observe(seconds)
                if lately is not None:
                    self._latencies[lately].extend((seconds,))
        self._rates["requests"].add(1)

    # Called by responses.

    def answered(self, n: int, outputs: Sequence[OutputState]) -> None:
        """All n completions of each prompt of a request have finished."""
        for first in range(0, len(outputs), n):
            longest = max(output.generated for output in outputs[first : first + n])
            self._histograms["request_params_n"].observe(n)
            self._histograms["request_max_num_generation_tokens"].observe(longest)

    # Read by clients.

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, for the registry. `_total` is added to the name of a counter."""
        gauges = self._gauges()
        shown = [(f"vllm:{name}", text, value(gauges)) for name, text, value in GAUGES]
        shown.append(("nanoserve:engine_up", "1 while the engine takes requests, else 0.", self._up()))
        for name, text, value_now in shown:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value_now)
            yield gauge
        yield self._waiting(gauges)
        yield self._cache_config()
        counted = [(f"vllm:{name}", text, value(gauges)) for name, text, value in COUNTERS]
        counted.append(("vllm:prompt_tokens", "Tokens of the prompts that were answered.", self._prompt_tokens))
        counted.append(("vllm:prompt_tokens_cached", "Of these, found in the prefix cache.", self._cached_tokens))
        counted.append(("vllm:generation_tokens", "Tokens generated.", self._generation_tokens))
        counted.append(("nanoserve:engine_restarts", "Engine processes started after a failure.", self._restarts()))
        counted.append(("nanoserve:log_lines_dropped", "Log lines dropped: stderr was not read.", dropped_lines()))
        for name, text, count in counted:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, count)
            yield counter
        ends = CounterMetricFamily("vllm:request_success", "Answers that ended.", labels=(*LABELS, "finished_reason"))
        for reason, count in self._finished.items():
            ends.add_metric((*self._labels, reason.value), count)
        yield ends

    def _waiting(self, gauges: Gauges) -> Metric:
        text = "Requests that wait: for memory or a place in the batch, or for anything else."
        waiting = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=(*LABELS, "reason"))
        for reason, count in (("capacity", gauges.waiting), ("deferred", 0)):
            waiting.add_metric((*self._labels, reason), count)
        return waiting

    def _cache_config(self) -> Metric:
        known = self._cache()
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in labels.", labels=(*LABELS, *known))
        if known:
            info.add_metric((*self._labels, *known.values()), 1)
        return info

    def exposition(self) -> tuple[bytes, str]:
        """The metrics as text, and the content type. Always Prometheus' text format: OpenMetrics would write `vllm_`
        for `vllm:`, and dashboards would not find the names."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def stats(self) -> dict[str, Any]:
        gauges = self._gauges()
        return {
            "uptime_seconds": round(self._clock() - self._start, 3),
            "requests": {
                "running": gauges.running,
                "waiting": gauges.waiting,
                "preemptions": gauges.preemptions,
                "finished": {reason.value: count for reason, count in self._finished.items()},
            },
            "tokens": {"prompt": self._prompt_tokens, "generated": self._generation_tokens},
            "pages": {
                "total": gauges.pages_total,
                "free": gauges.pages_free,
                "used": gauges.pages_used,
                "cached": gauges.pages_cached,
                "usage": round(gauges.usage, 6),
            },
            "prefix_cache": {
                "query_tokens": gauges.query_tokens,
                "hit_tokens": gauges.hit_tokens,
                "hit_rate": round(gauges.hit_rate, 6),
            },
            "throughput": {
                "window_seconds": WINDOW,
                **{f"{name}_per_second": round(rate.per_second(), 3) for name, rate in self._rates.items()},
            },
            "latency_seconds": {name: latencies.quantiles() for name, latencies in self._latencies.items()},
        }


def cache_config(engine: AsyncEngine) -> dict[str, str]:
    """The settings of the KV cache under vLLM's names; none until the engine is ready."""
    ready, options = engine.ready_info, engine.options
    if ready is None:
        return {}
    return {
        "block_size": str(ready.page_size),
        "num_gpu_blocks": str(ready.pages),
        "cache_dtype": ready.dtype,
        "enable_prefix_caching": str(options.enable_prefix_caching),
        "gpu_memory_utilization": str(options.gpu_memory_utilization),
    }


def attach(app: FastAPI) -> None:
    """Observe the engine, and the answers as they are sent."""
    server: ServerState = app.state.server
    engine = server.engine
    metrics = app.state.metrics = Metrics(
        server.settings.model_name,
        engine.max_model_len,
        lambda: engine.gauges,
        up=lambda: engine.health in (Health.READY, Health.DRAINING),
        restarts=lambda: engine.restarts,
        cache=lambda: cache_config(engine),
    )
    engine.observers += (metrics,)
    server.answered.append(metrics.answered)
