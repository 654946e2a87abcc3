"""A record says how many experts each step read. transformers' routers say which ones they are."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phase0_request.batch import Batch
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.recorder import Recorder
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.ranks_in_threads import split
from tests.phase2_prefill_decode.test_families import VARIANTS
from tests.phase2_prefill_decode.test_hybrids import VARIANTS as HYBRIDS
from tests.phase2_prefill_decode.test_identity import prompts

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def chosen_by(oracle: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Of each layer with experts, which ones each token chooses."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    return [layer.topk(oracle.config.num_experts_per_tok).indices for layer in logits]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["olmoe", "qwen3-moe-every-second"])
def test_a_record_says_how_many_experts_a_layer_read_on_average(name: str, ahead: int, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    oracle = tiny_model(family, **options)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    engine = continuous(model, TokenBudget(16), cache=PrefixCache(64, 4), ahead=ahead)
    lines: list[Line] = []
    Recorder(engine.core, lines.append)
    given = prompts(oracle.config.vocab_size, (5, 30, 11))
    answers = engine.generate(given, PARAMS)
    chosen = [
        chosen_by(oracle, prompt + list(answer.output_tokens)) for prompt, answer in zip(given, answers, strict=True)
    ]
    assert lines[0]["experts"] == oracle.config.num_experts
    done, steps = [len(prompt) for prompt in given], [line for line in lines if "step" in line]
    for line in steps:
        places = [(r, range(start, start + length)) for r, start, length in line.get("prefill", ())]
        for r in line.get("decode", ()):
            places.append((r, range(done[r], done[r] + 1)))
            done[r] += 1
        counts = []
        for layer in range(len(chosen[0])):
            rows = [(r, place) for r, whole in places for place in whole]
            if name == "olmoe" and layer == len(chosen[0]) - 1:  # after the last attention: rows that yield a token
                rows = [(r, place) for r, place in rows if place >= len(given[r]) - 1]
            of = [chosen[r][layer][place] for r, place in rows]
            counts.append(torch.bincount(torch.cat(of), minlength=lines[0]["experts"]) if of else torch.zeros(1))
        means = [[float((c > 0).sum()), float(c.max()), float(c.sum())] for c in counts]
        assert line["experts"] == pytest.approx(torch.tensor(means).mean(0).tolist(), abs=0.006)
    assert max(line["experts"][0] for line in steps) > oracle.config.num_experts_per_tok


def test_a_state_that_is_computed_again_changes_no_counts_of_the_step_in_flight(tmp_path: Path) -> None:
    family, options = HYBRIDS["qwen3-next"]
    oracle = tiny_model(family, **options)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    cache = CheckpointedPrefixCache(16, 64, 8)
    engine = continuous(model, TokenBudget(256), cache=cache, ahead=1)
    core, lines, again = engine.core, list[Line](), list[int]()
    Recorder(core, lines.append)
    shared, alone = prompts(oracle.config.vocab_size, (70, 20))
    engine.generate([shared], PARAMS)
    core.submit(Request("decodes", tuple(alone), replace(PARAMS, max_tokens=12)))
    core.step()
    core.step()
    second, pack = Request("second", tuple(shared), PARAMS), core.runner.pack

    def without_its_checkpoint(batch: Batch) -> Any:
        for part in batch.slices:
            if part.request is second and part.start == 64:
                cache.checkpoints.removed(cache.table(second)[:8])
                again.append(part.start)
        return pack(batch)

    with patch.object(core.runner, "pack", without_its_checkpoint):
        core.submit(second)
        while core.has_work:
            core.step()
    assert again == [64]
    top = oracle.config.num_experts_per_tok
    for line in lines[1:]:
        tokens = sum(length for _, _, length in line.get("prefill", ())) + len(line.get("decode", ()))
        last = len(line.get("out", ()))  # the last layer is after the last attention: rows that yield a token
        layers = oracle.config.num_hidden_layers
        assert line["experts"][2] == pytest.approx(top * ((layers - 1) * tokens + last) / layers, abs=0.006)


def test_the_experts_of_a_model_over_ranks_are_those_of_one(tmp_path: Path) -> None:
    family, options = VARIANTS["qwen3-moe-norm"]
    oracle = tiny_model(family, **options)
    directory, given = saved(oracle, tmp_path), prompts(oracle.config.vocab_size, (5, 9))

    def recorded(model: Model) -> list[list[float]]:
        lines: list[Line] = []
        engine = static(model)
        Recorder(engine.core, lines.append)
        engine.generate(given, PARAMS)
        return [line["experts"] for line in lines if "step" in line]

    alone = recorded(Model.load(directory, device="cpu", dtype="float32"))
    with split(directory, 2) as model:
        assert recorded(model) == alone != []


def test_the_record_of_a_model_without_experts_has_no_such_figures(tmp_path: Path) -> None:
    oracle = tiny_model("qwen3")
    engine, lines = static(Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")), list[Line]()
    Recorder(engine.core, lines.append)
    engine.generate(prompts(oracle.config.vocab_size, (5,)), PARAMS)
    assert len(lines) > 1
    assert not any("experts" in line for line in lines)
