"""Metrics, judged by prometheus_client's parser and by what vLLM's shipped dashboard asks of a server."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.async_engine import StepReport
from phase6_integration.process.messages import EngineRequest
from phase6_integration.process.outputs import OutputState, OutputTimes
from phase6_integration.wings.observe.metrics import KEPT, WINDOW, Latencies, Metrics, Rate, one_two_five

# The series that the panels of vLLM's dashboard read, and those that the contract adds to them.
READ_BY_THE_DASHBOARD = {
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
}
CONTRACT = {
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_inference_time_seconds_sum",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prompt_tokens_cached_total",
}
READ_BY_ENDPOINT_PICKERS = {  # the model server protocol of the gateway API's inference extension
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_running": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A Metrics, with the engine and the clock it looks at."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gauges = Gauges(pages_total=100, pages_free=100)
        self.cache = {"block_size": "16", "num_gpu_blocks": "100"}
        self.metrics = Metrics("tiny", 300, lambda: self.gauges, self.clock, cache=lambda: self.cache)

    def answer(self, reason: FinishReason, prompt: int = 7, tokens: int = 3, gap: float = 0.03) -> None:
        """One that waited 0.5 s, prefilled 0.25 s, and then had a token every `gap`."""
        times = OutputTimes(10.0)
        times.admitted = 10.5
        for i in range(tokens):
            times.tokens.append(10.75 + gap * i)
        times.finished = 10.75 + gap * max(tokens - 1, 0)
        state = OutputState(times, generated=tokens)
        self.metrics.finished(EngineRequest("x", (1,) * prompt, SamplingParams(max_tokens=20)), state, reason)

    def text(self) -> str:
        return self.metrics.exposition()[0].decode()

    def value(self, series: str, **labels: str) -> float:
        found = [
            sample.value
            for family in read_text(self.text())
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, f"{series} {labels}: {found}"
        return found[0]


def test_every_series_that_dashboards_read_is_there_before_anything_happened() -> None:
    names = {sample.name for family in read_text(Engine().text()) for sample in family.samples}
    assert names >= READ_BY_THE_DASHBOARD | CONTRACT
    ours = {
        "nanoserve:engine_up",
        "nanoserve:engine_restarts_total",
        "nanoserve:log_lines_dropped_total",
    }  # vLLM has none of these
    assert {name for name in names if not name.startswith("vllm:")} == ours


def test_the_reference_lists_every_metric() -> None:
    reference = (Path(__file__).parents[4] / "chapters/reference.md").read_text("utf-8")
    names = [family.name.removeprefix("vllm:") for family in read_text(Engine().text())]
    assert [name for name in names if f"`{name}`" not in reference] == []


def test_every_series_is_labelled_as_vllm_labels_it() -> None:
    samples = [sample for family in read_text(Engine().text()) for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0" for sample in samples)
    own = {name for sample in samples for name in sample.labels} - {"model_name", "engine"}
    assert own == {"le", "finished_reason", "reason", "block_size", "num_gpu_blocks"}


def test_endpoint_pickers_find_their_gauges_and_labels() -> None:
    found = {sample.name: set(sample.labels) for family in read_text(Engine().text()) for sample in family.samples}
    assert all(found[name] >= labels for name, labels in READ_BY_ENDPOINT_PICKERS.items())


def test_the_cache_is_described_once_the_engine_is_ready() -> None:
    engine = Engine()
    assert engine.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    engine.cache = {}
    assert not re.search(r"^vllm:cache_config_info", engine.text(), re.MULTILINE)


def test_types_are_those_of_vllm() -> None:
    types = {family.name: family.type for family in read_text(Engine().text())}
    assert {name for name, kind in types.items() if kind == "gauge"} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting_by_reason",
        "vllm:cache_config_info",
        "nanoserve:engine_up",
    }
    assert types["vllm:prompt_tokens"] == types["vllm:request_success"] == "counter"
    assert types["vllm:iteration_tokens_total"] == types["vllm:e2e_request_latency_seconds"] == "histogram"


def test_names_keep_their_colon() -> None:
    body, kind = Engine().metrics.exposition()
    assert kind.startswith("text/plain; version=0.0.4")
    assert b"vllm_" not in body


def test_gauges_are_those_of_the_latest_update() -> None:
    engine = Engine()
    engine.gauges = Gauges(3, 2, 100, 60, 30, 10, preemptions=4, query_tokens=50, hit_tokens=20)
    assert engine.value("vllm:num_requests_running") == 3
    assert engine.value("vllm:num_requests_waiting") == 2
    assert engine.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert engine.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert engine.value("vllm:kv_cache_usage_perc") == pytest.approx(0.3)
    assert engine.value("vllm:num_preemptions_total") == 4
    assert engine.value("vllm:prefix_cache_queries_total") == 50
    assert engine.value("vllm:prefix_cache_hits_total") == 20
    engine.gauges = replace(engine.gauges, running=0, waiting=0, pages_used=0)
    assert [
        engine.value(f"vllm:{g}") for g in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ] == [0, 0, 0]


def test_a_served_answer_is_in_every_histogram() -> None:
    engine = Engine()
    engine.answer(FinishReason.STOP, prompt=7, tokens=3, gap=0.03)
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
        assert engine.value(f"vllm:{name}_sum") == pytest.approx(value), name
        assert engine.value(f"vllm:{name}_count") == count, name
    assert engine.value("vllm:time_to_first_token_seconds_bucket", le="0.5") == 0
    assert engine.value("vllm:time_to_first_token_seconds_bucket", le="0.75") == 1
    assert engine.value("vllm:request_prompt_tokens_bucket", le="5.0") == 0
    assert engine.value("vllm:request_prompt_tokens_bucket", le="10.0") == 1


def test_the_completions_of_a_prompt_are_one_request() -> None:
    engine = Engine()
    engine.metrics.answered(2, [OutputState(OutputTimes(0), generated=count) for count in (3, 9, 4, 1)])
    assert (engine.value("vllm:request_params_n_sum"), engine.value("vllm:request_params_n_count")) == (4, 2)
    assert engine.value("vllm:request_max_num_generation_tokens_sum") == 9 + 4
    assert engine.value("vllm:request_max_num_generation_tokens_count") == 2


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    engine = Engine()
    engine.answer(FinishReason.LENGTH, tokens=1)
    assert engine.value("vllm:request_time_per_output_token_seconds_count") == 0
    assert engine.value("vllm:inter_token_latency_seconds_count") == 0
    assert engine.value("vllm:request_decode_time_seconds_count") == 1


@pytest.mark.parametrize("reason", list(FinishReason))
def test_ends_are_counted_by_their_reason_and_only_good_ones_have_latencies(reason: FinishReason) -> None:
    engine = Engine()
    engine.answer(reason)
    for other in FinishReason:
        assert engine.value("vllm:request_success_total", finished_reason=other.value) == (other is reason)
    good = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert engine.value("vllm:e2e_request_latency_seconds_count") == good


def test_tokens_are_counted_as_they_come_not_when_their_answer_ends() -> None:
    engine = Engine()
    engine.metrics.stepped(StepReport(7, 2, 0.01, engine.gauges, prompt_tokens=7, generated=3, cached_tokens=4))
    engine.metrics.stepped(StepReport(0, 3, 0.01, engine.gauges, generated=3))
    assert (engine.value("vllm:prompt_tokens_total"), engine.value("vllm:generation_tokens_total")) == (7, 6)
    assert engine.value("vllm:prompt_tokens_cached_total") == 4
    engine.answer(FinishReason.STOP)
    assert (engine.value("vllm:prompt_tokens_total"), engine.value("vllm:generation_tokens_total")) == (7, 6)


def test_steps_are_weighed_and_idle_ones_are_not() -> None:
    """A step's tokens are the prompt tokens that it computed and those that it generated."""
    engine = Engine()
    engine.metrics.stepped(StepReport(100, 27, 0.01, engine.gauges, prompt_tokens=100, generated=28))
    engine.metrics.stepped(StepReport(0, 0, 0.0, engine.gauges))
    assert engine.value("vllm:iteration_tokens_total_count") == 1
    assert engine.value("vllm:iteration_tokens_total_sum") == 128
    assert engine.value("vllm:iteration_tokens_total_bucket", le="64.0") == 0
    assert engine.value("vllm:iteration_tokens_total_bucket", le="128.0") == 1


def test_what_is_shown_does_not_grow_with_what_is_served() -> None:
    engine = Engine()
    engine.answer(FinishReason.STOP)
    shape = re.sub(r" \S+$", "", engine.text(), flags=re.MULTILINE)
    for i in range(5000):
        engine.answer(FinishReason.STOP, prompt=1 + i % 300, tokens=1 + i % 7, gap=0.001 * i)
    assert re.sub(r" \S+$", "", engine.text(), flags=re.MULTILINE) == shape
    assert len(engine.metrics._latencies["itl"]._values) == KEPT


def test_stats_are_finite_json_and_agree_with_the_metrics() -> None:
    engine = Engine()
    engine.gauges = Gauges(1, 2, 100, 60, 30, 10, query_tokens=50, hit_tokens=20)
    engine.metrics.stepped(StepReport(100, 20, 0.01, engine.gauges))
    engine.answer(FinishReason.STOP)
    engine.clock.now += 10
    stats = engine.metrics.stats()
    assert stats["uptime_seconds"] == 10
    assert stats["requests"]["running"] == 1
    assert stats["requests"]["finished"]["stop"] == 1
    assert stats["pages"] == {"total": 100, "free": 60, "used": 30, "cached": 10, "usage": 0.3}
    assert stats["prefix_cache"]["hit_rate"] == 0.4
    assert stats["throughput"]["prefill_tokens_per_second"] == 10
    assert stats["throughput"]["decode_tokens_per_second"] == 2
    assert stats["throughput"]["requests_per_second"] == pytest.approx(0.1)
    assert stats["latency_seconds"]["ttft"] == {"p50": 0.75, "p90": 0.75, "p99": 0.75}


def test_stats_of_nothing_say_none_and_not_nan() -> None:
    stats = Engine().metrics.stats()
    assert stats["latency_seconds"]["e2e"] == {"p50": None, "p90": None, "p99": None}
    assert stats["throughput"]["requests_per_second"] == 0
    assert stats["prefix_cache"]["hit_rate"] == 0


# Its parts.


def test_lengths_go_by_one_two_five() -> None:
    assert one_two_five(1) == [1]
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.per_second() == 0
    for _ in range(200):
        rate.add(5)
        rate.add(5)
        clock.now += 1
    assert rate.per_second() == 10
    assert len(rate._sums) <= WINDOW + 1
    clock.now += WINDOW / 2
    assert rate.per_second() == 5
    clock.now += WINDOW
    assert rate.per_second() == 0
    assert len(rate._sums) == 0


def test_a_rate_that_is_young_is_not_thinned_by_time_it_has_not_seen() -> None:
    clock = Clock()
    rate = Rate(clock)
    rate.add(30)
    clock.now += 3
    rate.add(1000)  # of a second that is not over
    assert rate.per_second() == 10


def test_quantiles_are_of_the_latest_values() -> None:
    latencies = Latencies()
    latencies.extend([9.0] * KEPT)
    latencies.extend(i / KEPT for i in range(KEPT))
    quantiles = latencies.quantiles()
    assert quantiles["p50"] == pytest.approx(0.5, abs=0.001)
    assert quantiles["p99"] == pytest.approx(0.99, abs=0.001)
