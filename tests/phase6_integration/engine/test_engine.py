"""NanoServingEngine: greedy identity with transformers, statistics, memory sizing, options and clean-up."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phase0_request import FinishReason, SamplingParams, Tokenizer
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights
from phase6_integration.engine.engine import NanoServingEngine
from tests.phase2_prefill_decode.models import FAMILIES, saved, variant
from tests.phase2_prefill_decode.test_identity import follows, prompts

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Any:
    with NanoServingEngine.from_pretrained(kv_cache_pages=256, check_invariants=True) as made:
        yield made


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """With chunks, a prefix cache and a pool so small that requests are preempted."""
    oracle = variant(family)
    asked = [prompt * 2 for prompt in prompts(300)]
    asked += [[*asked[-1][:40], 9], [*asked[-1][:33], 8, 7]]
    with NanoServingEngine.from_pretrained(
        saved(oracle, tmp_path),
        dtype="float32",
        kv_cache_pages=34,
        page_size=4,
        max_chunk_size=7,
        max_num_batched_tokens=24,
    ) as made:
        answers = made.generate(asked, GREEDY)
        stats = made.get_stats()
        assert stats["preemptions"] > 0
        assert stats["cache_hit_rate"] > 0
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.output_tokens) == 24
        assert follows(oracle, prompt, answer.output_tokens)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_in_8_bits_a_request_has_the_answer_that_it_has_alone(kv: str) -> None:
    """In chunks, with a prefix found in the cache, and computed again after a preemption."""
    asked = [prompt * 2 for prompt in prompts(300)]
    asked += [[*asked[-1][:40], 9], [*asked[-1][:33], 8, 7]]
    small = {"kv_cache_pages": 40, "page_size": 4, "max_chunk_size": 7, "max_num_batched_tokens": 24}
    with NanoServingEngine.from_pretrained(dtype="bfloat16", kv_cache_dtype=kv, **small) as made:
        assert made.parts.layout.dtype == kv
        answers = made.generate(asked, GREEDY)
        stats = made.get_stats()
        assert stats["preemptions"] > 0
        assert stats["cache_hit_rate"] > 0
    with NanoServingEngine.from_pretrained(dtype="bfloat16", kv_cache_dtype=kv, enable_prefix_caching=False) as made:
        alone = [made.generate([prompt], GREEDY)[0] for prompt in asked]
    assert [answer.output_tokens for answer in answers] == [answer.output_tokens for answer in alone]


def test_generate_takes_texts_or_token_ids_one_or_many(engine: NanoServingEngine) -> None:
    text = "A KV cache keeps"
    tokens = engine.parts.model.tokenizer.encode(text)  # type: ignore[union-attr]
    (one,) = engine.generate(text, GREEDY)
    (same,) = engine.generate(tokens, GREEDY)
    both = engine.generate([text, tokens], [GREEDY, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)])
    assert one.output_tokens == same.output_tokens == both[0].output_tokens
    assert both[1].output_tokens == one.output_tokens[:3]
    assert one.text == Tokenizer.from_pretrained().decode(one.output_tokens)
    assert one.finish_reason is FinishReason.LENGTH
    assert len(one.request.times.itl) == 23


def test_stream_yields_the_text_of_generate_and_closing_it_aborts(engine: NanoServingEngine) -> None:
    (whole,) = engine.generate(["Paging"], GREEDY)
    assert "".join(delta.text for delta in engine.stream("Paging", GREEDY)) == whole.text
    stream = engine.stream("Paging", GREEDY)
    first = next(stream)
    stream.close()
    assert not engine.has_work, "closing the stream aborts the request"
    assert first.request.finish_reason is FinishReason.ABORT


def test_step_drives_added_requests_and_abort_ends_one(engine: NanoServingEngine) -> None:
    (alone,) = engine.generate("Paging", GREEDY)
    first, second = engine.add_request("Paging", GREEDY), engine.add_request("A radix tree", GREEDY, priority=-1)
    tokens = 0
    while engine.has_work:
        step = engine.step()
        assert step is not None
        tokens += len([event for event in step.events if event.token is not None])
        if tokens > 20 and not second.finished:
            assert engine.abort(second)
            assert not engine.abort(second)
    assert engine.step() is None
    assert first.output_tokens == alone.output_tokens
    assert second.finish_reason is FinishReason.ABORT
    assert engine.parts.scheduler.cache.usage.referenced == 0


def test_stats_count_tokens_cache_hits_and_finished_requests() -> None:
    with NanoServingEngine.from_pretrained(kv_cache_pages=64, max_num_seqs=4, speculative_config=None) as made:
        shared = list(range(50, 98))
        made.generate([[*shared, n] for n in range(8)], SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
        stats = made.get_stats()
    assert stats["generated_tokens"] == 80
    assert stats["decode_tokens"] == 8 * 9
    assert stats["prefill_tokens"] == 49 + 7 * 1, "the shared pages are computed once"
    assert stats["cache_hit_rate"] == pytest.approx(7 * 48 / (8 * 49))
    assert stats["avg_tokens_per_step"] == (stats["prefill_tokens"] + stats["decode_tokens"]) / stats["steps"]
    assert stats["finished"] == {"stop": 0, "length": 8, "abort": 0, "error": 0, "timeout": 0}
    assert stats["pages"]["free"] + stats["pages"]["cached"] == stats["pages"]["total"] == 64
    assert stats["throughput"] > 0
    mean = stats["mean_ms"]
    assert 0 < mean["queue"] <= mean["ttft"] <= mean["e2e"] == pytest.approx(mean["ttft"] + 9 * mean["itl"])


def test_an_engine_from_a_config_and_weights() -> None:
    config = ModelConfig.from_pretrained(BUNDLED)
    weights, tokenizer = load_weights(Checkpoint(BUNDLED), config), Tokenizer.from_pretrained()
    with NanoServingEngine(config, weights, tokenizer, kv_cache_pages=256, max_chunk_size=256) as made:
        (found,) = made.generate("A KV cache keeps", GREEDY)
    with NanoServingEngine.from_pretrained(kv_cache_pages=64) as other:
        assert other.generate("A KV cache keeps", GREEDY)[0].output_tokens == found.output_tokens


def test_a_closed_engine_says_so() -> None:
    made = NanoServingEngine.from_pretrained(kv_cache_pages=64)
    request = made.add_request("Paging", GREEDY)
    made.close()
    made.close()
    assert request.finish_reason is FinishReason.ABORT
    with pytest.raises(RuntimeError, match="this engine was closed"):
        made.generate("Paging")


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    backend = replace(backend_for(torch.device("cpu")), free_bytes=lambda device: free)
    monkeypatch.setattr("phase2_prefill_decode.connect.backend_for", lambda device: backend)


def test_the_pool_is_sized_to_free_memory_and_limits_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with NanoServingEngine.from_pretrained(max_num_seqs=2, max_num_batched_tokens=16) as made:
        layout = made.parts.model.config.kv_layout(16)
        assert made.parts.scheduler.cache.usage.total == 2 * 2048 // 16, "two requests cannot use more"
    set_free_bytes(monkeypatch, 2 * 20 * layout.bytes_per_page)
    monkeypatch.setattr("phase6_integration.engine.sizing.peak_bytes", lambda work, device: 10 * layout.bytes_per_page)
    with NanoServingEngine.from_pretrained(gpu_memory_utilization=0.5) as made:
        assert made.parts.scheduler.cache.usage.total == 10
        with pytest.raises(ValueError, match="together at most 160 fit into the context"):
            made.generate([[5] * 160])
    with NanoServingEngine.from_pretrained(gpu_memory_utilization=0.5, dtype="float32") as made:
        assert made.parts.scheduler.cache.usage.total == 5, "float32 is twice as wide"
    with NanoServingEngine.from_pretrained(gpu_memory_utilization=0.5, kv_cache_dtype="int8") as made:
        in_8_bits = layout.head_dim + 4  # a number takes a byte, a scale four
        assert made.parts.scheduler.cache.usage.total == 10 * 2 * layout.head_dim // in_8_bits > 16
    with pytest.raises(ConfigError, match="max_model_len is 200 tokens, and the cache has room for 160"):
        NanoServingEngine.from_pretrained(gpu_memory_utilization=0.5, max_model_len=200)
    set_free_bytes(monkeypatch, 12 * layout.bytes_per_page)
    with pytest.raises(ConfigError, match="no memory is left for keys and values"):
        NanoServingEngine.from_pretrained()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1"),
        ({"page_size": 2.0}, "page_size must be an integer from 1 to 1024"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be a number above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be a number above 0"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority, longest-prefix"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of int8, fp8, got 'int4'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false"),
        ({"async_scheduling": "on"}, "async_scheduling must be true or false"),
        (
            {"speculative_config": {"method": "medusa"}},
            "method must be one of ngram, suffix, draft_model, got 'medusa'",
        ),
        ({"speculative_config": {"method": "ngram"}, "async_scheduling": True}, "async_scheduling launches a step"),
        ({"enable_chunked_prefill": False, "max_chunk_size": 8}, "max_chunk_size is for chunked prefill"),
        ({"quantize_embeddings": True}, "quantize_embeddings is for quantization, which is not set"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "at least max_model_len"),
        ({"max_model_len": 4096}, "max_model_len must be at most 2048"),
        ({"model": "/no/such/model"}, "there is no directory /no/such/model"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer from 1 to 64, got 0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide the model's num_attention_heads, 4; got 3"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "takes the first GPUs: device must be cuda or cpu"),
        ({"enable_piecewise_cuda_graph": True, "device": "cpu"}, "is for a GPU, and the model is on cpu"),
        ({"enable_piecewise_cuda_graph": True, "enforce_eager": True}, "goes neither with enforce_eager nor"),
    ],
)
def test_invalid_options_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NanoServingEngine.from_pretrained(**options)


def test_without_chunked_prefill_a_prompt_is_one_step() -> None:
    with NanoServingEngine.from_pretrained(enable_chunked_prefill=False, max_model_len=700, kv_cache_pages=128) as made:
        made.add_request(list(range(600)), GREEDY)
        step = made.step()
        assert step is not None
        assert step.prefill_tokens == 600


def test_without_prefix_caching_a_repeated_prompt_is_computed_again() -> None:
    with NanoServingEngine.from_pretrained(enable_prefix_caching=False, kv_cache_pages=64) as made:
        for _ in range(2):
            made.generate([list(range(40))], GREEDY)
        stats = made.get_stats()
    assert (stats["cache_hit_rate"], stats["prefill_tokens"], stats["pages"]["free"]) == (0, 80, 64)


def test_the_engine_needs_no_server_packages() -> None:
    """Offline use works without msgspec, fastapi and uvicorn, and without llguidance if no request has a grammar."""
    program = """
import sys
from dataclasses import replace
for name in ("msgspec", "fastapi", "uvicorn", "llguidance"):
    sys.modules[name] = None  # importing it raises ImportError
from phase6_integration import NanoServingEngine, SamplingParams
with NanoServingEngine.from_pretrained(kv_cache_pages=16, max_num_seqs=2) as engine:
    (answer,) = engine.generate("A KV cache", SamplingParams(max_tokens=4, temperature=0), progress=False)
    assert len(answer.output_tokens) == 4
    assert engine.get_stats()["generated_tokens"] == 4
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
