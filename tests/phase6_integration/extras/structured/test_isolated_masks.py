"""Masks that the process makes are those of phase 2, and the engine waits for none. The oracle is a Constraint."""

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from phase0_request import FinishReason
from phase0_request.params import GRAMMAR_REFUSED
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.extras.grammar.constraints import Constraint, fill_masks
from phase5_continuous import Scheduler
from tests.phase6_integration.cities import TOKENIZER
from tests.phase6_integration.extras.structured.isolated import (
    BRACE,
    EOS,
    GRAMMARS,
    SIZE,
    Here,
    bits,
    constraint_of,
    request,
    several,
    three_that_draw_together,
)


@pytest.mark.parametrize("seed", range(6))
def test_masks_and_forced_tokens_are_those_of_a_constraint_in_this_process(here: Here, seed: int) -> None:
    """Along random outputs, with steps that are void, processes that end between two tokens, and lists beside it."""
    rng = random.Random(seed)
    params: dict[str, Any] = rng.choice([{}, {"bad_words": [[9], [300, 5]]}, {"logprobs": 0}])
    made = request(**params)
    constraint, oracle = constraint_of(here, made), Constraint(made, SIZE, GRAMMARS)
    output = made.output_tokens
    while True:
        index = len(output)
        draft = rng.choice([[], [9, 9], TOKENIZER.encode('{"x":12}', False)[index : index + 3]])
        masks, late = bits(here, [(0, constraint, index)], draft)
        assert not late
        assert (masks == fill_masks(oracle.places(index, draft), SIZE)).all()
        mask = masks[0]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        for follower in (constraint, oracle):
            follower.take(index, token)
        forced = constraint.forced(index)
        assert forced == oracle.forced(index)
        constraint.take(index, token)
        assert constraint.forced(index) == forced, "an output may be read twice"
        if rng.random() < 0.2:
            continue  # the step is void: the token is drawn again
        output += [token, *(forced.tokens if forced else ())]
        if token in EOS or (forced and forced.ends) or len(output) > 60:
            return
        if rng.random() < 0.2:
            here.process.end()


def test_a_mask_that_is_not_ready_is_late_and_nothing_waits_for_it(silent: Here) -> None:
    made, plain = request(), request("plain", grammar=None, allowed_token_ids=[5])
    constraint, listed = constraint_of(silent, made), silent.of(plain)
    (late_bits, other_bits), late = bits(silent, [(3, constraint, 0), (4, listed, 0)])
    assert [*late] == [3]
    assert not late_bits.any()
    assert other_bits.any()
    assert not constraint.done()
    silent.process.turn()
    assert constraint.done()
    assert not bits(silent, [(3, constraint, 0)])[1]


def test_forced_tokens_that_come_too_late_are_drawn(silent: Here) -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("abc+d"))
    constraint, tokens = constraint_of(silent, made), [TOKENIZER.encode(letter, False)[0] for letter in "abc"]
    silent.process.turn()
    constraint.take(0, tokens[0])
    assert constraint.forced(0) is None
    made.output_tokens.append(tokens[0])
    assert bits(silent, [(0, constraint, 1)])[1] == {0: constraint}
    for _ in range(2):  # the answer behind the forced tokens, then the mask that was asked for
        silent.process.turn()
    (mask,), late = bits(silent, [(0, constraint, 1)])
    if late:
        silent.process.turn()
        (mask,), late = bits(silent, [(0, constraint, 1)])
    assert not late
    assert mask[tokens[1] // 32] == 1 << tokens[1] % 32, "b is the only one, and is drawn"


def test_a_token_behind_one_that_was_not_drawn_is_late_too(here: Here) -> None:
    _, (constraint,) = several(here, "")
    assert bits(here, [(0, constraint, 1)])[1] == {0: constraint}


def test_masks_behind_a_draft_are_not_those_of_another_draft(silent: Here) -> None:
    """A request whose mask is late gets another draft at the same place."""
    made = request()
    constraint, oracle = constraint_of(silent, made), Constraint(made, SIZE, GRAMMARS)
    drafts = TOKENIZER.encode('{"x":1', False)[:3], TOKENIZER.encode('{ "x":1', False)[:3], []
    bits(silent, [(0, constraint, 0)], drafts[0])
    silent.process.turn()
    for draft in drafts:
        wanted = fill_masks(oracle.places(0, draft), SIZE)
        for answered in (False, True):
            masks, late = bits(silent, [(0, constraint, 0)], draft)
            assert not late
            assert (masks[0] == wanted[0]).all()
            made_already = masks.any(axis=1)
            assert (masks == wanted).all() if answered else (masks[made_already] == wanted[made_already]).all()
            silent.process.turn()


def test_a_mask_that_is_on_its_way_is_used_though_a_draft_has_come(silent: Here) -> None:
    made = request()
    constraint, oracle = constraint_of(silent, made), Constraint(made, SIZE, GRAMMARS)
    draft = TOKENIZER.encode('{"x":1', False)[:3]
    bits(silent, [(0, constraint, 0)])
    bits(silent, [(0, constraint, 0)], draft)
    silent.process.turn()
    masks, late = bits(silent, [(0, constraint, 0)], draft)
    assert not late
    assert (masks[0] == fill_masks(oracle.places(0, draft), SIZE)[0]).all()


def test_tokens_that_are_drawn_before_an_answer_are_sent_together(silent: Here) -> None:
    made = request(grammar=LLMatcher.grammar_from_regex("[a-z]+"))
    constraint = constraint_of(silent, made)
    silent.process.turn()
    for index, token in enumerate(TOKENIZER.encode(letter, False)[0] for letter in "abc"):
        constraint.take(index, token)
        made.output_tokens.append(token)
        silent.process.poll()
    for _ in range(2):
        silent.process.turn()
    assert [message.start for batch in silent.process.made[0].batches for message in batch.follow] == [0, 0, 1]
    assert constraint.done()


def test_a_token_that_replaces_an_unanswered_one_is_sent_when_that_is_answered(silent: Here) -> None:
    """The answer to the first is about another place of the output."""
    _, constraints = three_that_draw_together(silent)
    assert constraints[0].ask(0)
    silent.process.turn()
    assert not constraints[0].done()
    silent.process.turn()
    assert constraints[0].done()
    (mask,), late = bits(silent, [(0, constraints[0], 0)])
    assert not late
    assert mask[BRACE // 32] & 1 << BRACE % 32


def test_a_grammar_that_is_none_ends_its_request_at_once(here: Here) -> None:
    scheduler, made = Scheduler(PagedCache(64, 4)), request(grammar="start: missing")
    scheduler.submit(made)
    constraint = constraint_of(here, made)
    assert not bits(here, [(0, constraint, 0)])[1]
    assert (constraint.error or "").startswith(f"{GRAMMAR_REFUSED}: the grammar cannot be used: at 1(8): unknown name")
    here.receive(scheduler, 0.0)
    (event,) = scheduler.drain()
    assert (event.request, event.finish_reason, made.error) == (made, FinishReason.ERROR, constraint.error)
