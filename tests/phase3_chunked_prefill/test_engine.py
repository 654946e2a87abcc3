"""Chunk invariance: chunk size, batch and page size do not change the tokens, which are those of transformers."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.engine import chunked
from phase4_radix.extras.invariants import check_cache
from tests.phase2_prefill_decode.models import saved, variant
from tests.phase2_prefill_decode.test_identity import follows, prompts, theirs

LENGTHS = (1, 16, 33, 3, 17, 40, 15)
LONGEST = max(LENGTHS)
ANSWER = 6
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def pool(page_size: int, tokens: int = 1024) -> PagedCache:
    return PagedCache(tokens // page_size, page_size)


class Known:
    """A small model of this phase, some prompts, and transformers' answer to each."""

    def __init__(self, name: str, directory: Path) -> None:
        oracle = variant(name)
        self.model = Model.load(saved(oracle, directory), device="cpu", dtype="float32")
        self.prompts = prompts(oracle.config.vocab_size, LENGTHS)
        self.answers = [theirs(oracle, prompt, ANSWER) for prompt in self.prompts]

    def found(self, budget: TokenBudget, page_size: int, order: Sequence[int]) -> list[list[int]]:
        """The engine's answers, in the order of `prompts`, when these are submitted in another order."""
        cache = pool(page_size)
        answers = chunked(self.model, budget, cache=cache).generate([self.prompts[n] for n in order], GREEDY)
        assert cache.usage.free == cache.usage.total
        by_number = dict(zip(order, answers, strict=True))
        return [by_number[n].output_tokens for n in range(len(order))]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral-window"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_chunk_size_from_one_to_whole_gives_the_tokens_of_transformers(known: Known, page_size: int) -> None:
    """In pages of 16, where chunks end within a page, at its end and past it; in others every third size, 1 to 40."""
    rng = random.Random(page_size)
    for chunk in range(1, LONGEST + 1, 1 if page_size == 16 else 3):
        order = rng.sample(range(len(LENGTHS)), len(LENGTHS))
        budget = TokenBudget(chunk, chunk + rng.randint(1, 60))
        assert known.found(budget, page_size, order) == known.answers, (budget, order)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known("qwen3", tmp_path_factory.mktemp("model"))


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(step, number of the prompt), by step."""
    order = draw(st.permutations(range(len(LENGTHS))))
    return sorted((draw(st.integers(0, 12)), number) for number in order)


@settings(max_examples=25, deadline=None)
@given(coming=arrivals(), chunk=st.integers(1, 48), more=st.integers(1, 48), page_size=st.sampled_from([1, 16, 64]))
def test_the_step_of_admission_does_not_change_the_tokens_of_a_request(
    qwen3: Known, coming: list[tuple[int, int]], chunk: int, more: int, page_size: int
) -> None:
    """Requests are admitted while others are in the middle of their prompts or answers."""
    cache, budget = pool(page_size), TokenBudget(chunk, chunk + more)
    core = chunked(qwen3.model, budget, cache=cache).core
    requests = {number: Request(str(number), tuple(qwen3.prompts[number]), GREEDY) for _, number in coming}
    step = 0
    while coming or core.has_work:
        while coming and coming[0][0] <= step:
            core.submit(requests[coming.pop(0)[1]])
            core.scheduler.admit(core.clock())
        done = core.step()
        assert done is None or done.prefill_tokens + done.decode_tokens <= budget.max_batched_tokens
        check_cache(cache)
        step += 1
    assert [requests[number].output_tokens for number in range(len(LENGTHS))] == qwen3.answers
    assert cache.usage.free == cache.usage.total


@pytest.mark.proof
def test_a_question_batched_with_long_prompts_has_the_tokens_of_transformers() -> None:
    oracle = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    model = Model.load(device="cpu", dtype="float32")
    assert model.tokenizer is not None
    question = model.tokenizer.chat([{"role": "user", "content": "What is a KV cache?"}])
    given = [*prompts(4096, [300, 2]), question, *prompts(4096, [515])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = chunked(model, TokenBudget(48, 64)).generate(given, params)
    assert [len(answer.output_tokens) for answer in answers] == [24] * 4
    assert all(follows(oracle, prompt, a.output_tokens) for prompt, a in zip(given, answers, strict=True))
    assert "keys and values" in answers[2].text
