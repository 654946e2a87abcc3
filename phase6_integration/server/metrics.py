"""Metrics: what the engine does, under the names that dashboards made for vLLM read.

It is an observer of the engine. What the engine itself counts is read when someone asks, so a gauge is never older than
the engine's last word. No label has a value that a client chose: what is kept does not grow with what is served.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from phase0_request.request import FinishReason
from phase6_integration.answers import AnswerState, Ask
from phase6_integration.async_engine import StepReport
from phase6_integration.server.histogram import Histogram, one_two_five
from phase6_integration.server.recent import WINDOW, Latencies, Rate
from phase6_integration.stats import Gauges

LABELS = ("model_name", "engine")
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
    ("num_preemptions", "Requests that lost their memory to others and were computed again.", lambda g: g.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda g: g.query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda g: g.hit_tokens),
)


class Metrics:
    """Fills from what the engine tells its observers; `exposition` is what Prometheus reads, `stats` what people do."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        gauges: Callable[[], Gauges],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._labels = (model_name, "0")
        self._gauges = gauges
        self._clock = clock
        self._start = clock()
        self._prompt_tokens = self._generation_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        lengths = one_two_five(max(max_model_len, 1))
        self._histograms = {
            "time_to_first_token_seconds": Histogram(TTFT),
            "inter_token_latency_seconds": Histogram(TOKEN),
            "request_time_per_output_token_seconds": Histogram(TOKEN),
            "e2e_request_latency_seconds": Histogram(REQUEST),
            "request_queue_time_seconds": Histogram(REQUEST),
            "request_prefill_time_seconds": Histogram(REQUEST),
            "request_decode_time_seconds": Histogram(REQUEST),
            "request_prompt_tokens": Histogram(lengths),
            "request_generation_tokens": Histogram(lengths),
            "request_max_num_generation_tokens": Histogram(lengths),
            "iteration_tokens_total": Histogram(STEP),
        }
        self._rates = {name: Rate(clock) for name in ("prefill_tokens", "decode_tokens", "requests")}
        self._latencies = {name: Latencies() for name in ("ttft", "itl", "e2e", "queue")}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    # What the engine tells.

    def stepped(self, report: StepReport) -> None:
        self._prompt_tokens += report.answered
        self._generation_tokens += report.generated
        if tokens := report.prefill_tokens + report.decode_tokens:
            self._histograms["iteration_tokens_total"].observe(tokens)
            self._rates["prefill_tokens"].add(report.prefill_tokens)
            self._rates["decode_tokens"].add(report.decode_tokens)

    def finished(self, ask: Ask, state: AnswerState, reason: FinishReason) -> None:
        """Latencies are those of answers that came to their end."""
        self._finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._served(ask, state)

    def _served(self, ask: Ask, state: AnswerState) -> None:
        times, into = state.times, self._histograms
        into["request_prompt_tokens"].observe(len(ask.prompt))
        into["request_generation_tokens"].observe(state.generated)
        into["request_max_num_generation_tokens"].observe(ask.params.max_tokens)
        gaps = times.itl
        into["inter_token_latency_seconds"].extend(gaps)
        self._latencies["itl"].extend(gaps)
        per_token = times.decode / len(gaps) if times.decode is not None and gaps else None
        for name, lately, seconds in (
            ("time_to_first_token_seconds", "ttft", times.ttft),
            ("e2e_request_latency_seconds", "e2e", times.e2e),
            ("request_queue_time_seconds", "queue", times.queue),
            ("request_prefill_time_seconds", None, times.prefill),
            ("request_decode_time_seconds", None, times.decode),
            ("request_time_per_output_token_seconds", None, per_token),
        ):
            if seconds is not None:
                into[name].observe(seconds)
                if lately is not None:
                    self._latencies[lately].extend((seconds,))
        self._rates["requests"].add(1)

    # What others read.

    def collect(self) -> Iterator[Metric]:
        """All of it as Prometheus' own types. Names are those of vLLM; a counter's gets its `_total` when written."""
        gauges = self._gauges()
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(self._labels, value(gauges))
            yield gauge
        counted = [(name, text, value(gauges)) for name, text, value in COUNTERS]
        counted.append(("prompt_tokens", "Tokens of the prompts that were answered.", self._prompt_tokens))
        counted.append(("generation_tokens", "Tokens generated.", self._generation_tokens))
        for name, text, count in counted:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(self._labels, count)
            yield counter
        ends = CounterMetricFamily("vllm:request_success", "Answers that ended.", labels=(*LABELS, "finished_reason"))
        for reason, count in self._finished.items():
            ends.add_metric((*self._labels, reason.value), count)
        yield ends
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", name.replace("_", " ").capitalize() + ".", labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def exposition(self) -> tuple[bytes, str]:
        """The metrics as text, and its content type. It is the older of the two formats whoever asks: the newer one,
        unless asked otherwise, writes `vllm_` for `vllm:`, and no dashboard would find a thing."""
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
