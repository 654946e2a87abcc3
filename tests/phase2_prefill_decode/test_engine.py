"""The engine of this phase with the bundled model: its answers, how they end, and that all pages are freed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.scheduler import StaticScheduler
from phase4_radix.extras.invariants import check_cache
from tests.phase2_prefill_decode.models import padded_bundle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["What is a KV cache?", "Hello!", "Why does paging matter?", "How does a radix tree work?"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(dtype="float32", device="cpu")


def alone(model: Model, prompt: str, params: SamplingParams) -> list[int]:
    return static(model, seed=5).generate([prompt], params)[0].output_tokens


@pytest.mark.proof
def test_a_question_is_answered_and_the_answer_ends_by_itself(model: Model) -> None:
    assert model.tokenizer is not None
    chat = model.tokenizer.chat([{"role": "user", "content": "What is a KV cache?"}])
    answer = static(model).generate([chat], SamplingParams(temperature=0, max_tokens=96))[0]
    assert answer.finish_reason is FinishReason.STOP
    assert "keys and values" in answer.text


def test_an_output_does_not_depend_on_the_batch(model: Model) -> None:
    """In the order of the prompts, of one token to several hundred; answers of any length, greedy and sampled."""
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 4000) for _ in range(length)] for length in (1, 7, 16, 33, 90, 300) * 2]
    draw.shuffle(prompts)
    params = [
        SamplingParams(temperature=n % 3 / 2, top_p=0.9, max_tokens=draw.randint(1, 24), seed=n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    together_ = [c.output_tokens for c in static(model).generate(prompts, params)]
    assert together_ == [
        static(model).generate([prompt], [one])[0].output_tokens for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [len(answer) for answer in together_] == [one.max_tokens for one in params]


def test_batches_smaller_than_the_set_give_the_same_answers(model: Model) -> None:
    wanted = [c.output_tokens for c in static(model).generate(PROMPTS, GREEDY)]
    assert [c.output_tokens for c in static(model, batch_size=3).generate(PROMPTS, GREEDY)] == wanted
    tight = PagedCache(8, 4)  # room for one or two requests at a time
    assert [c.output_tokens for c in static(model, cache=tight).generate(PROMPTS, GREEDY)] == wanted
    assert tight.usage.free == 8


def test_the_stream_is_the_answer_in_pieces(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = {c.request.prompt_tokens: c.text for c in static(model).generate(PROMPTS, params)}
    texts: dict[tuple[int, ...], str] = {}
    ends = []
    for delta in static(model).stream(PROMPTS, params):
        assert delta.request.prompt_tokens not in ends  # nothing after the end
        texts[delta.request.prompt_tokens] = texts.get(delta.request.prompt_tokens, "") + delta.text
        if delta.finish_reason is not None:
            ends.append(delta.request.prompt_tokens)
    assert texts == whole
    assert sorted(ends) == sorted(whole)


def test_a_closed_stream_aborts_its_requests_and_frees_every_page(model: Model) -> None:
    cache = PagedCache(64, 16)
    engine = static(model, cache=cache)
    stream = engine.stream(PROMPTS, GREEDY)
    request = next(stream).request
    with pytest.raises(RuntimeError, match="generating already"):
        engine.generate(PROMPTS, GREEDY)
    stream.close()
    assert request.finish_reason is FinishReason.ABORT
    assert cache.usage.free == 64
    check_cache(cache)
    assert len(engine.generate(PROMPTS, GREEDY)) == 4


def test_a_request_of_another_caller_may_arrive_between_two_deltas(model: Model) -> None:
    engine = static(model, cache=PagedCache(64, 16))
    wanted = "".join(delta.text for delta in static(model).stream(PROMPTS[:1], GREEDY))
    stream = engine.stream(PROMPTS[:1], GREEDY)
    text = next(stream).text
    engine.core.submit(Request("another", (5, 6), SamplingParams(max_tokens=2)))
    assert text + "".join(delta.text for delta in stream) == wanted


class TestEnds:
    """By length, by EOS, by a stop token, by a stop string, by the end of the context."""

    def test_by_a_stop_token_which_is_not_part_of_the_text(self, model: Model) -> None:
        tokens = alone(model, PROMPTS[0], GREEDY)
        stop = tokens[5]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        answer = static(model).generate([PROMPTS[0]], params)[0]
        assert answer.output_tokens == tokens[: tokens.index(stop) + 1]
        assert answer.finish_reason is FinishReason.STOP
        assert model.tokenizer is not None
        assert answer.text == model.tokenizer.decode(answer.output_tokens[:-1])

    @pytest.mark.parametrize("last", [False, True], ids=["between", "with_the_last_token"])
    def test_by_a_stop_string_which_is_not_part_of_the_text(self, model: Model, last: bool) -> None:
        text = static(model).generate([PROMPTS[0]], GREEDY)[0].text
        stop = text[-3:] if last else text[8:12]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
        answer = static(model).generate([PROMPTS[0]], params)[0]
        assert answer.text == text[: text.index(stop)]
        assert answer.finish_reason is FinishReason.STOP

    def test_by_the_end_of_the_context(self, model: Model) -> None:
        room = model.config.max_position_embeddings
        prompt = [5 + i % 50 for i in range(room - 3)]
        params = SamplingParams(temperature=0, max_tokens=50, min_tokens=20, ignore_eos=True)
        answer = static(model).generate([prompt], params)[0]
        assert (answer.finish_reason, len(answer.output_tokens)) == (FinishReason.LENGTH, 3)

    def test_not_by_eos_before_min_tokens(self, model: Model) -> None:
        assert model.tokenizer is not None
        chat = model.tokenizer.chat([{"role": "user", "content": "Hello!"}])
        early = static(model).generate([chat], SamplingParams(temperature=0, max_tokens=96))[0]
        least = len(early.output_tokens) + 3
        params = SamplingParams(temperature=0, max_tokens=96, min_tokens=least)
        late = static(model).generate([chat], params)[0]
        assert late.output_tokens[: len(early.output_tokens) - 1] == early.output_tokens[:-1]
        assert len(late.output_tokens) > least or late.finish_reason is FinishReason.LENGTH
        assert not set(late.output_tokens[:least]) & model.eos_ids


def test_logprobs_are_those_of_the_tokens_and_of_the_top_alternatives(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    plain, asked = static(model).generate(PROMPTS[:2], [GREEDY, params])
    assert plain.more == []
    assert len(asked.more) == 5
    for token, said in zip(asked.output_tokens, asked.more, strict=True):
        assert said.top[0] == (token, said.logprob)
        assert len(said.top) == 3
        assert [p for _, p in said.top] == sorted((p for _, p in said.top), reverse=True)


class TestRefusals:
    """Bad arguments are refused before anything runs. The message says what is allowed."""

    @pytest.mark.parametrize(
        ("prompts", "params", "message"),
        [
            ("one text", None, "a list of texts"),
            ([1, 2], None, "a list of texts"),
            (["a", "b"], [GREEDY], "2 prompts and 1 params"),
            ([[4096]], None, "token ids of this model run from 0 to 4095, got 4096"),
            ([[1] * 2048], None, "2048 tokens and max_tokens is 1; together at most 2048 fit"),
            ([[]], None, "the prompt is empty"),
            ([[1]], SamplingParams(logit_bias={9999: 1.0}), "run from 0 to 4095, got 9999"),
            ([[1]], SamplingParams(stop_token_ids=[5000]), "run from 0 to 4095, got 5000"),
            ([[1] * 200], SamplingParams(max_tokens=100), "may grow to 299 tokens, and the pool has room for 256"),
        ],
    )
    def test_in_words(self, model: Model, prompts: Sequence[str], params: SamplingParams | None, message: str) -> None:
        engine = static(model, cache=PagedCache(16, 16))
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, params)
        assert engine.core.scheduler.cache.usage.free == 16
        assert len(engine.generate(["Hello!"], GREEDY)) == 1

    def test_stop_strings_without_a_tokenizer(self, model: Model) -> None:
        without = Model(model.config, model.decoder)
        with pytest.raises(ValueError, match="need a tokenizer"):
            static(without).generate([[1, 2]], SamplingParams(stop="x"))
        with pytest.raises(ValueError, match="this model has no tokenizer; give token ids"):
            static(without).generate(["text"])
        assert static(without).generate([[1, 2]], GREEDY)[0].text == ""


def test_a_plan_may_cut_prompts_and_only_the_last_piece_yields_a_token(model: Model) -> None:
    """Phases 3 to 5 plan in other ways: how a step is mixed does not change the tokens."""
    wanted = [c.output_tokens for c in static(model).generate(PROMPTS, GREEDY)]

    def by_threes(running: Sequence[Request]) -> Batch:
        turn = next(turns)
        chosen = [request for i, request in enumerate(running) if (i + turn) % 3 or len(running) == 1]
        return Batch(tuple(Slice(r, r.computed, min(3, r.total - r.computed)) for r in chosen or running))

    turns: Iterator[int] = iter(range(10_000))
    scheduler = StaticScheduler(PagedCache(512, 16), model.eos_ids, plan_step=by_threes)
    assert [c.output_tokens for c in Engine.of(model, scheduler, scheduler.cache).generate(PROMPTS, GREEDY)] == wanted


def test_a_padded_id_is_never_generated(model: Model, tmp_path: Path) -> None:
    """An lm_head with eight rows more than the tokenizer has tokens. Their logits are often the largest."""
    padded = Model.load(padded_bundle(tmp_path), dtype="float32", device="cpu")
    assert (padded.config.vocab_size, padded.num_tokens) == (4104, 4096)
    for params in (GREEDY, replace(GREEDY, temperature=1.0, seed=3)):
        found, wanted = (static(one).generate(PROMPTS, params) for one in (padded, model))
        assert [one.output_tokens for one in found] == [one.output_tokens for one in wanted]
        assert [one.text for one in found] == [one.text for one in wanted]
