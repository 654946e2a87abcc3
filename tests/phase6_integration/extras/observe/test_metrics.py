"""Metrics, judged by prometheus_client's parser and by what vLLM's shipped dashboard asks of a server."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as read_text

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.engine.stats import Gauges
from phase6_integration.extras.observe.metrics import Metrics, one_two_five
from phase6_integration.process.messages import EngineRequest, Progress, Ready, Update
from phase6_integration.process.outputs import OutputStream
from tests.phase6_integration.fake_engine import FakeEngine

# The series that the panels of vLLM's dashboard read, and those that the contract adds to them.
DASHBOARD = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count prompt_tokens_total
generation_tokens_total inter_token_latency_seconds_bucket num_requests_running num_requests_waiting
time_to_first_token_seconds_bucket time_to_first_token_seconds_sum kv_cache_usage_perc request_prompt_tokens_bucket
request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_max_num_generation_tokens_sum
"""
CONTRACT = """
num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total request_time_per_output_token_seconds_bucket
iteration_tokens_total_bucket request_params_n_bucket request_params_max_tokens_bucket cache_config_info
request_inference_time_seconds_sum num_requests_waiting_by_reason prompt_tokens_cached_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""
OURS = {"nanoserve:engine_up", "nanoserve:engine_restarts_total", "nanoserve:log_lines_dropped_total"}
GAUGES = {"num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"}


def stream_of(prompt: int = 7, prompts: int = 1, n: int = 1) -> OutputStream:
    request = EngineRequest("x", [(1,) * prompt] * prompts, SamplingParams(), [20] * prompts, n, arrival=10.0)
    return OutputStream(request, None, lambda _: None)


def step(generated: int, prefill: int, gauges: Gauges) -> Update:
    return Update(0.0, 0.01, prefill, generated, [Progress("x", 300)] * generated, gauges)


class Observed:
    """An engine that is ready, and its metrics."""

    def __init__(self) -> None:
        self.engine = FakeEngine(max_model_len=300)
        self.engine.handle(Ready(300, 100, 16, "cpu", "float32"))
        self.metrics = Metrics(self.engine, "tiny")

    def answer(self, reason: FinishReason, prompt: int = 7, tokens: int = 3, gap: float = 0.03) -> None:
        """One that waited 0.5 s, prefilled 0.25 s, and then had a token every `gap`."""
        stream = stream_of(prompt)
        (output,) = stream.outputs
        output.generated, times = tokens, output.times
        times.admitted = 10.5
        for i in range(tokens):
            times.tokens.append(10.75 + gap * i)
        times.finished = 10.75 + gap * max(tokens - 1, 0)
        self.metrics.finished(stream, output, reason)

    def text(self) -> str:
        return generate_latest(self.metrics.registry).decode()

    def value(self, series: str, **labels: str) -> float:
        (value,) = [
            sample.value
            for family in read_text(self.text())
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]
        return value

    def values(self, *names: str) -> Sequence[float]:
        return [self.value(f"vllm:{name}") for name in names]


def test_every_series_that_dashboards_read_is_there_with_its_type_and_labels_before_anything_happened() -> None:
    families = list(read_text(Observed().text()))
    samples = [sample for family in families for sample in family.samples]
    names = {sample.name for sample in samples}
    assert names >= {f"vllm:{name}" for name in (DASHBOARD + CONTRACT).split()}
    assert {name for name in names if not name.startswith("vllm:")} == OURS, "vLLM has none of these"
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0" for sample in samples)
    types = {family.name: family.type for family in families}
    gauges = {name.removeprefix("vllm:") for name, kind in types.items() if kind == "gauge"}
    assert gauges == {*GAUGES, "cache_config_info", "nanoserve:engine_up"}
    assert types["vllm:prompt_tokens"] == types["vllm:request_success"] == "counter"
    assert types["vllm:iteration_tokens_total"] == types["vllm:e2e_request_latency_seconds"] == "histogram"


def test_the_reference_lists_every_metric() -> None:
    reference = (Path(__file__).parents[4] / "chapters/reference.md").read_text("utf-8")
    names = [family.name.removeprefix("vllm:") for family in read_text(Observed().text())]
    assert [name for name in names if f"`{name}`" not in reference] == []


def test_the_cache_is_described_once_the_engine_is_ready() -> None:
    """By the labels that endpoint pickers read: the gateway API's inference extension."""
    observed = Observed()
    assert observed.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    observed.engine.ready_info = None
    assert not re.search(r"^vllm:cache_config_info", observed.text(), re.MULTILINE)


def test_gauges_are_those_of_the_latest_update() -> None:
    observed = Observed()
    observed.engine.gauges = Gauges(3, 2, 100, 60, 30, 10, preemptions=4, query_tokens=50, hit_tokens=20)
    now = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert observed.values(*now) == [3, 2, pytest.approx(0.3)]
    assert observed.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert observed.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    totals = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    assert observed.values(*totals) == [4, 50, 20]
    observed.engine.gauges = replace(observed.engine.gauges, running=0, waiting=0, pages_used=0)
    assert observed.values(*now) == [0, 0, 0]


def test_accepted_drafts_are_counted_by_their_place() -> None:
    observed = Observed()
    observed.engine.gauges = Gauges(extended=5, beyond=12, kept=(4, 2))
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    assert observed.values(*(f"spec_decode_{name}" for name in names)) == [5, 12, 6]
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [observed.value(per_place, position=str(place)) for place in range(2)] == [4, 2]
    assert observed.metrics.stats()["speculation"] == {"drafts": 5, "draft_tokens": 12, "accepted": [4, 2]}


def test_a_completed_answer_is_in_every_histogram() -> None:
    observed = Observed()
    observed.answer(FinishReason.STOP, prompt=7, tokens=3, gap=0.03)
    for name, value, count in (
        ("time_to_first_token_seconds", 0.75, 1),
        ("inter_token_latency_seconds", 0.06, 2),
        ("request_time_per_output_token_seconds", 0.03, 1),
        ("e2e_request_latency_seconds", 0.81, 1),
        ("request_queue_time_seconds", 0.5, 1),
        ("request_prefill_time_seconds", 0.25, 1),
        ("request_decode_time_seconds", 0.06, 1),
        ("request_prompt_tokens", 7, 1),
        ("request_generation_tokens", 3, 1),
        ("request_inference_time_seconds", 0.31, 1),
        ("request_params_max_tokens", 20, 1),
    ):
        assert observed.values(f"{name}_sum", f"{name}_count") == [pytest.approx(value), count], name
    for name, below, bound in (
        ("time_to_first_token_seconds", "0.5", "0.75"),
        ("request_prompt_tokens", "5.0", "10.0"),
    ):
        assert observed.value(f"vllm:{name}_bucket", le=below) == 0
        assert observed.value(f"vllm:{name}_bucket", le=bound) == 1


def test_the_completions_of_a_prompt_are_one_request() -> None:
    observed = Observed()
    stream = stream_of(prompts=2, n=2)
    for output, tokens in zip(stream.outputs, (3, 9, 4, 1), strict=True):
        output.generated, output.times.finished = tokens, 11.0
        observed.metrics.finished(stream, output, FinishReason.STOP)
    assert observed.values("request_params_n_sum", "request_params_n_count") == [4, 2]
    longest = "request_max_num_generation_tokens"
    assert observed.values(f"{longest}_sum", f"{longest}_count") == [9 + 4, 2]


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    observed = Observed()
    observed.answer(FinishReason.LENGTH, tokens=1)
    counts = ("request_time_per_output_token_seconds_count", "inter_token_latency_seconds_count")
    assert observed.values(*counts, "request_decode_time_seconds_count") == [0, 0, 1]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_ends_are_counted_by_their_reason_and_only_good_ones_have_latencies(reason: FinishReason) -> None:
    observed = Observed()
    observed.answer(reason)
    for other in FinishReason:
        assert observed.value("vllm:request_success_total", finished_reason=other.value) == (other is reason)
    good = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert observed.values("e2e_request_latency_seconds_count") == [good]


def test_tokens_are_counted_as_they_come_and_idle_steps_are_not() -> None:
    """A step's tokens are the prompt tokens that it computed and those that it generated."""
    observed, gauges = Observed(), Gauges()
    observed.metrics.stepped(step(28, 100, gauges), prompt_tokens=104, cached_tokens=4)
    observed.metrics.stepped(step(0, 0, gauges), prompt_tokens=0, cached_tokens=0)
    observed.answer(FinishReason.STOP)
    assert observed.values("prompt_tokens_total", "prompt_tokens_cached_total") == [104, 4]
    assert observed.values("generation_tokens_total") == [28]
    assert observed.values("iteration_tokens_total_count", "iteration_tokens_total_sum") == [1, 128]
    assert observed.value("vllm:iteration_tokens_total_bucket", le="64.0") == 0
    assert observed.value("vllm:iteration_tokens_total_bucket", le="128.0") == 1


def test_what_is_shown_does_not_grow_with_what_is_served() -> None:
    observed = Observed()
    observed.answer(FinishReason.STOP)
    shape = re.sub(r" \S+$", "", observed.text(), flags=re.MULTILINE)
    for i in range(1000):
        observed.answer(FinishReason.STOP, prompt=1 + i % 300, tokens=1 + i % 7, gap=0.001 * i)
    assert re.sub(r" \S+$", "", observed.text(), flags=re.MULTILINE) == shape


def test_stats_agree_with_the_metrics() -> None:
    observed = Observed()
    empty = observed.metrics.stats()
    assert (empty["pages"]["usage"], empty["prefix_cache"]["hit_rate"]) == (0, 0), "and not NaN, which is no JSON"
    observed.engine.gauges = Gauges(1, 2, 100, 60, 30, 10, query_tokens=50, hit_tokens=20)
    observed.metrics.stepped(step(20, 100, observed.engine.gauges), prompt_tokens=100, cached_tokens=0)
    observed.answer(FinishReason.STOP)
    stats = observed.metrics.stats()
    assert (stats["requests"]["running"], stats["requests"]["waiting"]) == (1, 2)
    assert stats["requests"]["finished"] == {reason.value: int(reason is FinishReason.STOP) for reason in FinishReason}
    assert stats["tokens"] == {"prompt": 100, "generated": 20}
    assert stats["pages"] == {"total": 100, "free": 60, "used": 30, "cached": 10, "usage": 0.3}
    assert stats["prefix_cache"]["hit_rate"] == 0.4


def test_lengths_go_by_one_two_five() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]
