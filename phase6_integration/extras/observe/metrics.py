"""Prometheus metrics under the names of vLLM, at /metrics, and the same numbers as JSON for people, at /stats.

`Metrics` observes the engine and the answers. Gauges and the engine's own counters are read from its latest update on
demand. No label takes a value from a client, so memory does not grow with the number of requests.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from phase0_request.request import FinishReason
from phase6_integration.api.state import Server, ServerState
from phase6_integration.extras.observe.health_routes import reason
from phase6_integration.logs import DroppingHandler
from phase6_integration.process.async_engine import AsyncEngine, Observer
from phase6_integration.process.health import Health
from phase6_integration.process.messages import Update
from phase6_integration.process.outputs import Output, OutputStream

disable_created_metrics()  # type: ignore[no-untyped-call]  # vLLM has none

LABELS = ("model_name", "engine")
REASON = "finished_reason"
CACHE = ("block_size", "num_gpu_blocks", "cache_dtype")  # labels
UP = (Health.READY, Health.DRAINING)
# Bounds of the buckets: in seconds as vLLM has them, so that dashboards of several servers can be laid over each other.
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
TTFT += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75]
TOKEN += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
REQUEST = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0]
REQUEST += [30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
STEP = [1.0, *(float(8 << i) for i in range(12))]  # tokens
CHOICES = [1.0, 2.0, 5.0, 10.0, 20.0]

HISTOGRAMS: dict[str, list[float] | None] = {  # by the bounds of their buckets; None: of lengths in tokens
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": None,
    "request_generation_tokens": None,
    "request_max_num_generation_tokens": None,
    "request_params_max_tokens": None,
    "request_params_n": CHOICES,
    "iteration_tokens_total": STEP,
}
COUNTERS = {
    "prompt_tokens": "Tokens of the prompts that were answered.",
    "prompt_tokens_cached": "Of these, found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
ENGINE: tuple[tuple[type[Any], str, str, Callable[[AsyncEngine], float]], ...] = (
    (GAUGE, "vllm:num_requests_running", "Requests that take part in steps.", lambda e: e.gauges.running),
    (GAUGE, "vllm:num_requests_waiting", "Requests that wait, preempted ones included.", lambda e: e.gauges.waiting),
    (GAUGE, "vllm:kv_cache_usage_perc", "The share of pages that running requests hold.", lambda e: e.gauges.usage),
    (COUNTER, "vllm:num_preemptions", "Times that a request lost its pages.", lambda e: e.gauges.preemptions),
    (COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda e: e.gauges.query_tokens),
    (COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found.", lambda e: e.gauges.hit_tokens),
    (COUNTER, "vllm:spec_decode_num_drafts", "Drafts verified.", lambda e: e.gauges.extended),
    (COUNTER, "vllm:spec_decode_num_draft_tokens", "Tokens of drafts.", lambda e: e.gauges.beyond),
    (COUNTER, ACCEPTED, "Of these, accepted.", lambda e: sum(e.gauges.kept)),
    (GAUGE, "nanoserve:engine_up", "1 while the engine runs, else 0.", lambda e: e.health in UP),
    (COUNTER, "nanoserve:engine_restarts", "Engine processes started after a failure.", lambda e: e.restarts),
    (COUNTER, "nanoserve:log_lines_dropped", "Lines of the log that were dropped.", lambda e: DroppingHandler.dropped),
)
router = APIRouter(tags=["server"])


def one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return [step for step in steps if step <= most]


class Metrics(Observer):
    """Counts what an engine does, in Prometheus' own objects."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine, self._start = engine, time.monotonic()
        self._labels = model_name, "0"
        self.registry = registry = CollectorRegistry()
        registry.register(self)
        self._histograms, self._counters = dict[str, Histogram](), dict[str, Counter]()
        for name, bounds in HISTOGRAMS.items():
            text, buckets = name.replace("_", " ").capitalize() + ".", bounds or one_two_five(engine.max_model_len)
            histogram = Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=buckets)
            self._histograms[name] = histogram.labels(*self._labels)
        for name, text in COUNTERS.items():
            self._counters[name] = Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(*self._labels)
        ended = Counter("vllm:request_success", "Answers that ended.", (*LABELS, REASON), registry=registry)
        self._ended = {reason: ended.labels(*self._labels, reason.value) for reason in FinishReason}

    # Called by the engine.

    def stepped(self, update: Update, prompt_tokens: int, cached_tokens: int) -> None:
        generated = sum(progress.token is not None for progress in update.progress)
        self._counters["prompt_tokens"].inc(prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(cached_tokens)
        self._counters["generation_tokens"].inc(generated)
        if tokens := update.prefill_tokens + generated:
            self._histograms["iteration_tokens_total"].observe(tokens)

    def finished(self, stream: OutputStream, output: Output, reason: FinishReason) -> None:
        """Latencies cover requests that were completed."""
        self._ended[reason].inc()
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        times, gaps = output.times, output.times.itl
        prefill = decode = inference = None
        if times.tokens:
            decode = times.tokens[-1] - times.tokens[0]
            if times.admitted is not None:
                prefill, inference = times.tokens[0] - times.admitted, times.tokens[-1] - times.admitted
        for name, value in (
            ("time_to_first_token_seconds", times.ttft),
            ("e2e_request_latency_seconds", times.e2e),
            ("request_queue_time_seconds", times.queue_time),
            ("request_prefill_time_seconds", prefill),
            ("request_decode_time_seconds", decode),
            ("request_inference_time_seconds", inference),
            ("request_time_per_output_token_seconds", sum(gaps) / len(gaps) if gaps else None),
            ("request_prompt_tokens", output.prompt_tokens),
            ("request_generation_tokens", output.generated),
            ("request_params_max_tokens", output.max_tokens),
            *(("inter_token_latency_seconds", gap) for gap in gaps),
        ):
            if value is not None:
                self._histograms[name].observe(value)
        n = stream.request.n
        answers = stream.outputs[output.index // n * n :][:n]  # to the same prompt
        if all(answer.times.finished is not None for answer in answers):
            self._histograms["request_params_n"].observe(n)
            self._histograms["request_max_num_generation_tokens"].observe(max(answer.generated for answer in answers))

    # Read by clients.

    def collect(self) -> Iterator[Metric]:
        """The engine's own figures, for the registry. `_total` is added to the name of a counter."""
        for family, name, text, value in ENGINE:
            figure = family(name, text, labels=LABELS)
            figure.add_metric(self._labels, value(self._engine))
            yield figure
        text = "Requests that wait: for memory or a place in the batch, or for anything else."
        waiting = GAUGE("vllm:num_requests_waiting_by_reason", text, labels=(*LABELS, "reason"))
        for why, count in (("capacity", self._engine.gauges.waiting), ("deferred", 0)):
            waiting.add_metric((*self._labels, why), count)
        yield waiting
        places = COUNTER(f"{ACCEPTED}_per_pos", "The same by their place in the draft.", labels=(*LABELS, "position"))
        for place, count in enumerate(self._engine.gauges.kept):
            places.add_metric((*self._labels, str(place)), count)
        yield places
        options = ("enable_prefix_caching", "gpu_memory_utilization")
        info = GAUGE("vllm:cache_config_info", "The KV cache, in labels.", labels=(*LABELS, *CACHE, *options))
        if (ready := self._engine.ready_info) is not None:
            known = (
                ready.page_size,
                ready.pages,
                ready.kv_cache_dtype,
                *(getattr(self._engine.options, name) for name in options),
            )
            info.add_metric((*self._labels, *map(str, known)), 1)
        yield info

    def stats(self) -> dict[str, Any]:
        now, counted = self._engine.gauges, self._counters
        pages = {"total": now.pages_total, "free": now.pages_free, "used": now.pages_used, "cached": now.pages_cached}
        prefixes = {"query_tokens": now.query_tokens, "hit_tokens": now.hit_tokens}
        finished = {reason.value: _total(ended) for reason, ended in self._ended.items()}
        requests = {"running": now.running, "waiting": now.waiting, "preemptions": now.preemptions}
        return {
            "uptime_seconds": round(time.monotonic() - self._start, 3),
            "requests": {**requests, "finished": finished},
            "tokens": {"prompt": _total(counted["prompt_tokens"]), "generated": _total(counted["generation_tokens"])},
            "pages": {**pages, "usage": round(now.usage, 6)},
            "prefix_cache": {**prefixes, "hit_rate": round(now.hit_rate, 6)},
            "speculation": {"drafts": now.extended, "draft_tokens": now.beyond, "accepted": [*now.kept]},
        }


def _total(counter: Counter) -> int:
    (family,) = counter.collect()
    return int(family.samples[0].value)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, under the names that vLLM dashboards read. Always as text, since OpenMetrics would
    write `vllm_` for `vllm:`."""
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/stats")
async def stats(server: Server, request: Request) -> dict[str, Any]:
    """The same as JSON: current values, and counts since the start."""
    engine = server.engine
    state = {
        "model": server.settings.model_name,
        "health": engine.health.value,
        "reason": reason(engine),
        "engine_restarts": engine.restarts,
    }
    figures: dict[str, Any] = request.app.state.metrics.stats()
    return state | figures


def attach(app: FastAPI) -> None:
    server: ServerState = app.state.server
    metrics = app.state.metrics = Metrics(server.engine, server.settings.model_name)
    server.engine.observers += (metrics,)
    app.include_router(router)
