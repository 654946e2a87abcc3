"""A shared prefix is computed once: which requests wait on a prefix in progress, and when pages are published."""

import pytest

from phase0_request import FinishReason, Request, SamplingParams, TokenLogprobs
from phase2_prefill_decode.extras.outcome import add_prompt_logprobs
from phase3_chunked_prefill.budget import TokenBudget
from tests.phase5_continuous.moments import engine, lengths, prefix_engine
from tests.phase5_continuous.support import request


@pytest.mark.parametrize("ahead", [0, 1])
def test_identical_prompts_that_arrive_together_are_computed_once(ahead: int) -> None:
    one = prefix_engine(ahead=ahead)
    one.submit(*(request(name, [5] * 33, max_tokens=1) for name in "abcd"))
    one.run().check_the_end()
    computed = sum(batch.num_tokens for batch in one.batches)
    assert computed == 33 + 3, "the shared prefix is computed once, and the last token by each of the four requests"
    assert one.scheduler.cache.counts.duplicates == 0  # type: ignore[attr-defined]


def test_a_request_waits_only_for_the_pages_it_shares() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60, max_tokens=1), request("b", [5] * 18 + [6] * 10, max_tokens=1))
    one.submit(request("c", [7] * 20, max_tokens=1))
    first = lengths(one.step())
    assert first == {"a": 16, "c": 16}, f"b waits for the 16 tokens that a is computing for both; tokens: {first}"
    second = lengths(one.step())
    assert second.get("b") == 12, f"16 of b's 28 tokens are cached now, and its next page differs from a's: {second}"
    one.run().check_the_end()


def test_no_request_waits_for_the_page_of_its_last_prompt_token() -> None:
    one = prefix_engine(12)
    one.submit(request("a", [5] * 16), request("b", [5] * 16))
    assert lengths(one.step()) == {"a": 12}
    assert lengths(one.step()) == {"a": 4, "b": 4}
    one.run().check_the_end()


def test_a_request_waits_for_that_page_if_its_prompt_has_one_token_more() -> None:
    one = prefix_engine(12)
    one.submit(request("a", [5] * 17), request("b", [5] * 17))
    assert [lengths(one.step()) for _ in range(2)] == [{"a": 12}, {"a": 5}]
    assert lengths(one.step()) == {"a": 1, "b": 1}
    one.run().check_the_end()


def test_requests_do_not_wait_across_salts_or_without_a_prefix_cache() -> None:
    one = prefix_engine()
    one.submit(*(request(name, [5] * 33, max_tokens=1, cache_salt=name) for name in "ab"))
    assert set(lengths(one.step())) == {"a", "b"}
    two = engine(budget=TokenBudget(16, 64))
    two.submit(*(request(name, [5] * 33, max_tokens=1) for name in "ab"))
    assert set(lengths(two.step())) == {"a", "b"}


def test_an_abort_of_the_request_that_computes_a_prefix_passes_it_to_one_that_waits() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60), request("b", [5] * 60), request("c", [5] * 60))
    assert lengths(one.step()) == {"a": 16}, "b and c wait for the prefix that a is computing"
    one.scheduler.finish(one.requests["a"], FinishReason.ABORT, one.now)
    assert lengths(one.step()) == {"b": 16}, "a is gone: b computes the prefix, and c waits for it"
    one.run().check_the_end()
    assert one.requests["c"].finish_reason is FinishReason.LENGTH


def test_a_prompt_has_the_whole_step_while_other_requests_wait_on_its_prefix() -> None:
    one = prefix_engine(64)
    one.submit(request("a", [5] * 64 + [7] * 200, max_tokens=1))
    one.submit(*(request(name, [5] * 64, max_tokens=1) for name in "bc"))
    assert lengths(one.step()) == {"a": 32}  # the others were not known to wait on it yet
    assert lengths(one.step()) == {"a": 64}
    assert lengths(one.step()) == {"a": 32, "b": 4, "c": 4}
    one.run().check_the_end()


def test_requests_with_prompt_logprobs_do_not_wait_for_pages_that_they_could_not_use() -> None:
    one = prefix_engine()
    scored = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    one.submit(*(Request(name, (5,) * 40, scored) for name in "abc"))
    assert lengths(one.step()) == {"a": 16, "b": 16, "c": 16}


def test_a_request_waits_for_pages_whose_prompt_logprobs_it_has() -> None:
    """Preempted after 16 tokens, it may use the pages of these, which another request is computing."""
    one = prefix_engine(8)
    again = Request("again", (5,) * 40, SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    add_prompt_logprobs(again, 0, [TokenLogprobs(-1.0, ())] * 16)
    one.submit(request("first", [5] * 40, max_tokens=1), again)
    assert [lengths(one.step()) for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 8, "again": 8}]
    assert one.batches[-1].slices[1].start == 16


def test_a_request_that_waits_on_a_prefix_is_passed_by_others() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 60), request("b", [5] * 60), request("c", [6] * 10))
    step = set(lengths(one.step()))
    assert step == {"a", "c"}, f"b waits for the prefix that a is computing, and c passes it; in the step: {step}"
    one.run().check_the_end()


@pytest.mark.parametrize("chunk", [64, 16, 5])
def test_every_full_page_of_a_prompt_is_published_when_it_is_computed(chunk: int) -> None:
    one = prefix_engine(chunk)
    one.submit(request("a", [5] * 33))
    cached = []
    while not one.requests["a"].output_tokens:
        one.step()
        cached.append(one.scheduler.cache.cached_tokens(request("b", [5] * 33)))
    assert cached == {64: [32], 16: [16, 32, 32], 5: [4, 8, 12, 16, 20, 24, 28, 32]}[chunk]


def test_the_pages_of_a_failed_slice_are_not_cached() -> None:
    one = prefix_engine()
    one.submit(request("a", [5] * 12))
    one.plan()
    one.commit({0: "its logits are not finite"})
    assert one.scheduler.cache.usage.cached == 0
    assert one.scheduler.cache.cached_tokens(request("b", [5] * 12)) == 0
