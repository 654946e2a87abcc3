"""/metrics of a server with the bundled model, after requests that are known."""

import httpx2
from prometheus_client.parser import text_string_to_metric_families as read_text

from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.fake_engine import served

PROMPT = list(range(20, 60))
REQUESTS = [  # one after the other
    {"prompt": PROMPT, "max_tokens": 5},
    {"prompt": [PROMPT[:10], PROMPT[:7]], "max_tokens": 3, "n": 2},
    {"prompt": PROMPT, "max_tokens": 4, "stream": True},
]


def test_a_scrape_has_the_numbers_of_the_requests_before_it() -> None:
    options = EngineOptions(kv_cache_pages=128, threads=1, page_size=8)
    with served(lambda: AsyncEngine(options), ServerSettings()) as url, httpx2.Client(base_url=url) as http:
        for body in REQUESTS:
            assert http.post("/v1/completions", json={"ignore_eos": True, **body}).status_code == 200
        text = http.get("/metrics").text
    samples = [sample for family in read_text(text) for sample in family.samples]
    found = {sample.name: sample.value for sample in samples if "le" not in sample.labels}
    (cache,) = (sample.labels for sample in samples if sample.name == "vllm:cache_config_info")
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("8", "128")
    assert cache["enable_prefix_caching"] == "True"
    prompts = 40 + 2 * (10 + 7) + 40
    cached, hits = found["vllm:prompt_tokens_cached_total"], found["vllm:prefix_cache_hits_total"]
    assert hits == cached >= 39 // 8 * 8, "the last request has the prompt of the first"
    expected = {
        "vllm:prompt_tokens_total": prompts,
        "vllm:generation_tokens_total": 5 + 4 * 3 + 4,
        "vllm:iteration_tokens_total_sum": prompts - cached + 5 + 4 * 3 + 4,
        "vllm:request_params_n_sum": 1 + 2 + 2 + 1,
        "vllm:request_params_n_count": 4,
        "vllm:request_params_max_tokens_sum": 5 + 4 * 3 + 4,
        "vllm:request_params_max_tokens_count": 6,
        "vllm:request_max_num_generation_tokens_sum": 5 + 3 + 3 + 4,
        "vllm:request_inference_time_seconds_count": 6,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: found[name] for name in expected} == expected
    times = [found[f"vllm:request_{part}_time_seconds_sum"] for part in ("inference", "prefill", "decode")]
    assert abs(times[0] - times[1] - times[2]) < 1e-6
