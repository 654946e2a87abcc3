"""Constraints: grammars, allowed tokens and bad words, as masks of the next token and as forced tokens."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from phase0_request import Request, SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.extras.grammar.constraints import Constraint, fill_masks, in_flight
from phase2_prefill_decode.extras.grammar.grammar import KEPT, Grammars
from phase2_prefill_decode.extras.outcome import Forced
from tests.phase2_prefill_decode.sampling_cases import logprobs_in, packed, sampled, sampler_of
from tests.phase2_prefill_decode.steps import output_of

TOKENIZER = Tokenizer.from_pretrained()
SIZE, EOS = TOKENIZER.vocab_size + 70, min(TOKENIZER.eos_ids)
GRAMMARS = Grammars(TOKENIZER, SIZE, TOKENIZER.eos_ids)
YES_OR_NO = LLMatcher.grammar_from_regex("yes|no|not at all")
POINT = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"coordinate": {"type": "integer"}},
        "required": ["coordinate"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)


def request(output: Sequence[int] = (), **params: object) -> Request:
    made = Request("a", (1, 2), SamplingParams(**{"max_tokens": 500, **params}))  # type: ignore[arg-type]
    made.output_tokens += output
    return made


def constraint(made: Request) -> Constraint:
    return Constraint(made, SIZE, GRAMMARS)


def allowed(of: Constraint, index: int) -> list[int]:
    """The tokens that may be drawn at this place of the output."""
    (row,) = fill_masks([(of, index)], SIZE)
    return [token for token in range(len(row) * 32) if row[token // 32] >> token % 32 & 1]


def first(text: str) -> int:
    """The first token of a text."""
    return TOKENIZER.encode(text, add_special_tokens=False)[0]


def texts(tokens: Sequence[int]) -> set[str]:
    return {TOKENIZER.decode([token]) for token in tokens}


# Grammars


def test_the_mask_holds_exactly_the_tokens_that_the_grammar_can_go_on_with() -> None:
    made = request(grammar=YES_OR_NO)
    of = constraint(made)
    begins = allowed(of, 0)
    words = ("yes", "no", "not at all")
    assert texts(begins) == {
        t for t in texts(range(TOKENIZER.vocab_size)) - {""} if any(w.startswith(t) for w in words)
    }
    no = TOKENIZER.encode("no", add_special_tokens=False)
    made.output_tokens += no
    after = allowed(of, len(no))
    assert EOS in after, "the answer may end here"
    assert texts(set(after) - TOKENIZER.eos_ids) == {
        t for t in texts(range(TOKENIZER.vocab_size)) if t and "t at all".startswith(t)
    }


def test_every_token_that_ends_the_output_may_end_a_grammar() -> None:
    grammars = Grammars(TOKENIZER, SIZE, {EOS, 5, 7})
    made = request(TOKENIZER.encode("no", add_special_tokens=False), grammar=YES_OR_NO)
    assert {EOS, 5, 7} <= set(allowed(Constraint(made, SIZE, grammars), len(made.output_tokens)))


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the grammar cannot be used: "):
        GRAMMARS.compile("start: missing_rule")
    with pytest.raises(ValueError, match=r"^request a has a grammar, and this model no tokenizer to follow it$"):
        Constraint(request(grammar=YES_OR_NO), SIZE, None)


def test_a_grammar_is_compiled_once_and_each_request_follows_a_copy() -> None:
    grammars = Grammars(TOKENIZER, SIZE, TOKENIZER.eos_ids)
    prepared = grammars.compile(POINT)
    brace = first("{")
    assert prepared.consume_token(brace)
    fresh = grammars.compile(POINT)
    assert fresh.compute_ff_tokens()[0] == brace
    for number in range(KEPT + 5):
        grammars.compile(LLMatcher.grammar_from_regex(f"a{{{number + 1}}}"))
    assert grammars._compiled.cache_info().currsize == KEPT


# Forced tokens


def test_what_the_grammar_leaves_no_choice_about_is_forced() -> None:
    made = request(grammar=POINT)
    of = constraint(made)
    brace = first("{")
    of.take(0, brace)
    forced = of.forced(0)
    assert forced is not None
    assert '{"coordinate":'.startswith(TOKENIZER.decode([brace, *forced.tokens]))
    assert len(forced.tokens) > 2
    assert not forced.ends
    made.output_tokens += [brace, *forced.tokens]
    assert len(allowed(of, len(made.output_tokens))) > 1, "behind them there is a choice"


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"bad_words": [[5]]}, {"allowed_token_ids": [*range(SIZE)]}])
def test_forced_tokens_are_drawn_one_by_one_where_drawing_them_matters(more: dict[str, object]) -> None:
    of = constraint(request(grammar=POINT, **more))
    of.take(0, first("{"))
    assert of.forced(0) is None, f"with {next(iter(more))}, no token is forced"


def test_the_end_of_the_grammar_is_the_end_of_the_output() -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("no"))
    of = constraint(made)
    token = first("no")
    of.take(0, token)
    assert of.forced(0) == Forced((), ends=True), "after no, the grammar of no is complete"


def test_forced_text_that_spells_a_control_token_is_drawn_as_text() -> None:
    name = next(text for token in sorted(TOKENIZER.eos_ids) if (text := TOKENIZER.name(token)))
    made = request(grammar=LLMatcher.grammar_from_json_schema({"const": f"a{name}b"}))
    of, output = constraint(made), made.output_tokens
    while json.dumps(f"a{name}b") != TOKENIZER.decode(output):
        index = len(output)
        token = allowed(of, index)[-1]
        of.take(index, token)
        forced = of.forced(index) or Forced()
        output += [token, *forced.tokens]
        assert of.error is None
        assert not TOKENIZER.eos_ids & set(output)
    assert forced.ends


def test_forced_tokens_may_be_the_end_of_the_grammar() -> None:
    of = constraint(request(grammar=LLMatcher.grammar_from_regex("abc+d")))
    a, b, c, d = map(first, "abcd")
    of.take(0, a)
    assert of.forced(0) == Forced((b,)), "c may begin a longer token: it is not forced yet"
    assert allowed(of, 1) == [b], "they are not committed yet"
    made = request([a], grammar=LLMatcher.grammar_from_regex("ab|cd"))
    of = constraint(made)
    of.take(0, a)
    made.output_tokens.clear()
    of.take(0, c)
    assert of.forced(0) == Forced((d,), ends=True)


def test_an_end_token_ends_a_grammar_that_could_go_on_even_if_it_is_ignored() -> None:
    no = TOKENIZER.encode("no", add_special_tokens=False)
    of = constraint(request(no, grammar=YES_OR_NO, ignore_eos=True))
    of.go_to(len(no))
    of.take(len(no), EOS)
    assert of.forced(len(no)) == Forced((), ends=True)


# Following the output


def test_a_token_in_flight_is_followed_and_forgotten_again_if_it_is_discarded() -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("ab|cd"))
    of = constraint(made)
    a, b, c, d = map(first, "abcd")
    of.take(0, a)
    assert allowed(of, 1) == [b], "under ab|cd, only b may follow a, which is drawn and not committed"
    assert c in allowed(of, 0), "the step that drew a was void: at place 0 both a and c are allowed again"
    of.take(0, c)
    of.take(0, c)
    made.output_tokens.append(c)
    assert allowed(of, 1) == [d], "c was taken twice and committed once: only d may follow"


def test_a_token_drawn_in_vain_is_not_followed() -> None:
    """Behind a token that forces others, a step in flight has drawn one in their place."""
    made = request(grammar=LLMatcher.grammar_from_regex("glacier[!?]|desert"))
    of = constraint(made)
    g, part, *ends = map(first, ("g", "l", "!", "?"))
    of.take(0, g)
    forced = of.forced(0)
    assert forced is not None
    assert part != forced.tokens[0]
    made.output_tokens += [g, *forced.tokens]
    of.take(1, part)
    assert of.forced(1) is None, "output token 1 was committed already: a token drawn for its place changes nothing"
    assert allowed(of, len(made.output_tokens)) == sorted(ends), "after glacier, ! or ? may follow"


def test_a_gap_in_the_output_raises() -> None:
    with pytest.raises(RuntimeError, match=r"^output token 3 cannot be constrained: 0 are known before it$"):
        constraint(request(grammar=POINT)).go_to(3)


# Lists of tokens


def test_allowed_tokens_are_the_only_ones() -> None:
    found = allowed(constraint(request(allowed_token_ids=[5, 31, 32, 100])), 0)
    assert found == [5, 31, 32, 100], "a list of allowed tokens is the whole mask where there is no grammar"


def test_lists_and_a_grammar_hold_together() -> None:
    of = constraint(request(grammar=LLMatcher.grammar_from_regex("[ab]")))
    a, b = map(first, "ab")
    assert allowed(of, 0) == sorted([a, b]), "the grammar allows a and b"
    listed = constraint(request(grammar=LLMatcher.grammar_from_regex("[ab]"), bad_words=[[b]]))
    assert allowed(listed, 0) == [a], "the grammar allows a and b, the bad words exclude b"


def test_a_bad_word_is_never_completed() -> None:
    made = request(bad_words=[[5, 6, 7], [9]])
    of, every = constraint(made), {*range(-(-SIZE // 32) * 32)}
    assert every - {*allowed(of, 0)} == {9}, "bad words 5 6 7 and 9: at the beginning, 9 alone is excluded"
    made.output_tokens += [6, 5, 6]
    assert every - {*allowed(of, 3)} == {9, 7}, "after 6 5 6, 7 would complete 5 6 7"
    made.output_tokens += [6]
    assert every - {*allowed(of, 4)} == {9}, "after 6 5 6 6, 7 would not"


# In a step


def test_a_grammar_that_fails_excludes_all_tokens_of_its_row_and_says_why() -> None:
    made = request([EOS], grammar=POINT)  # a token that the grammar does not have there
    of = constraint(made)
    assert allowed(of, 1) == [], "an errored matcher would allow the end of the output"
    assert of.error is not None
    assert of.error.startswith("its grammar cannot be followed any further: ")


def test_a_token_that_the_grammar_fails_at_does_not_end_the_output() -> None:
    of = constraint(request(grammar=POINT))
    of.take(0, first("z"))
    assert of.error is not None
    assert of.forced(0) is None, "an errored matcher says that it has stopped"


def test_a_grammar_that_others_have_used_up_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share the lexer, and its limit of states: one output that needs many would fail all others."""
    grammars = Grammars(TOKENIZER, SIZE, TOKENIZER.eos_ids)
    greedy = {"grammar": LLMatcher.grammar_from_regex("[a-z ]*a[a-z ]{900}")}
    hungry, other = (Constraint(request(**greedy), SIZE, grammars) for _ in range(2))
    monkeypatch.setattr(hungry, "renew", lambda: False)
    rng, index = np.random.default_rng(0), 0
    while tokens := [token for token in allowed(hungry, index) if token not in TOKENIZER.eos_ids]:
        hungry.take(index, int(rng.choice(tokens)))
        index += 1
    assert hungry.error is not None
    assert "too many" in hungry.error
    assert len(allowed(other, 0)) > 1000
    assert other.error is None
    assert len(allowed(Constraint(request(**greedy), SIZE, grammars), 0)) > 1000


def test_only_constrained_rows_are_masked_and_logprobs_are_the_models_own() -> None:
    sampler = sampler_of(TOKENIZER.eos_ids, SIZE, seed=0, num_tokens=TOKENIZER.vocab_size, tokenizer=TOKENIZER)
    greedy = {"temperature": 0.0}
    rows = [
        Request("free", (1,), SamplingParams(**greedy, logprobs=1)),
        Request("bound", (1,), SamplingParams(**greedy, grammar=YES_OR_NO, logprobs=1, logit_bias={9: 100})),
    ]
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(3))
    sampling = packed(sampler, rows)
    output = output_of(sampled(sampler, logits, sampling), sampling.works, range(2), 2)
    free, bound = output.tokens
    assert free == logits[0, : TOKENIZER.vocab_size].argmax()
    assert bound in allowed(constraint(request(grammar=YES_OR_NO)), 0)
    assert bound is not None
    assert logprobs_in(output)[1].logprob == pytest.approx(float(logits[1].log_softmax(-1)[bound]), abs=1e-5)


@pytest.mark.parametrize(("index", "waits"), [(1, False), (2, False), (3, True)])
def test_a_mask_is_in_flight_if_it_depends_on_a_token_that_is(index: int, waits: bool) -> None:
    known, of = constraint(request([5], bad_words=[[9]])), constraint(request([5, 6], bad_words=[[9]]))
    assert in_flight([(0, known, 1, ()), (1, of, index, ())]) is waits


@pytest.mark.parametrize("lists", [{}, {"bad_words": [[first("1"), first("2")]], "allowed_token_ids": range(SIZE)}])
def test_the_masks_behind_a_draft_are_those_of_an_output_that_has_it(lists: dict[str, object]) -> None:
    """They are empty behind a token that is not allowed, and behind one that forces others: nothing is drawn there."""
    rng, params = np.random.default_rng(1), {"grammar": LLMatcher.grammar_from_regex("([12]{2,9}, and)+"), **lists}
    of, reached = constraint(made := request(**params)), 0
    for _ in range(60):
        del made.output_tokens[int(rng.integers(1 + len(made.output_tokens))) :]
        index, without = len(made.output_tokens), constraint(request(made.output_tokens, **params))
        draft, wanted = list[int](), [allowed(without, index)]
        for place in range(index, index + 5):
            token = int(rng.choice(wanted[-1])) if wanted[-1] and rng.random() < 0.9 else int(rng.integers(SIZE))
            is_allowed = token in wanted[-1]
            draft.append(token)
            without.take(place, token)
            wanted.append(allowed(without, place + 1) if is_allowed and without.forced(place) is None else [])
        masks = fill_masks(of.places(index, draft), SIZE)
        assert [
            np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks
        ] == wanted
        reached += sum(map(bool, wanted[1:]))
        if wanted[0]:
            of.take(index, token := int(rng.choice(wanted[0])))
            made.output_tokens.append(token)
    assert reached > 40


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_under_the_masks_is_valid_json(seed: int) -> None:
    """With every token as likely as any other, and forced ones taken as they come."""
    rng, made = np.random.default_rng(seed), request(grammar=POINT)
    of, output = constraint(made), made.output_tokens
    while True:
        index = len(output)
        token = int(rng.choice([t for t in allowed(of, index) if t not in TOKENIZER.eos_ids] or [EOS]))
        of.take(index, token)
        output.append(token)
        forced = of.forced(index)
        output += forced.tokens if forced else ()
        if (forced and forced.ends) or token in TOKENIZER.eos_ids:
            break
    assert isinstance(json.loads(TOKENIZER.decode(output))["coordinate"], int)
