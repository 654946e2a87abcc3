"""The runner over numpy. The oracle is the runner over torch: the same engine gets the same tokens of both."""

import json

from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.lab.in_numpy import operations
from phase2_prefill_decode.lab.in_numpy.forward import Forward, PagedRunner
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.scheduler import Scheduler

QUESTIONS = (
    "What is a KV cache?",
    "Why are prompts computed in chunks?",
    "How does a scheduler choose the next request, and what happens when no page is free?",
    "Hello!",
)


def conversations() -> list[Request]:
    tokenizer, params = Tokenizer.from_pretrained(), SamplingParams(temperature=0, max_tokens=40)
    prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [Request(f"r{number}", tuple(prompt), params) for number, prompt in enumerate(prompts)]


def test_the_tokens_are_those_of_torch_with_shared_pages_chunks_and_preemption() -> None:
    asked, budget = conversations(), TokenBudget(16, 24)
    expected = continuous(Model.load(dtype="float32"), budget).generate(
        [request.prompt_tokens for request in asked], [request.params for request in asked]
    )
    cache = PrefixCache(24, 4)
    config = json.loads((BUNDLED / "config.json").read_text())
    forward = Forward(operations, config, operations.weights(BUNDLED / "model.safetensors"), cache.max_tokens)
    core = EngineCore(Scheduler(cache, config["eos_token_id"], budget), PagedRunner(forward, cache))
    for request in asked:
        core.submit(request)
    slices = [(part.request.id, part.start) for step in core.run() for part in step.batch]
    assert [request.output_tokens for request in asked] == [answer.output_tokens for answer in expected]
    assert len(slices) > len(set(slices)), "no request was preempted and computed again"
