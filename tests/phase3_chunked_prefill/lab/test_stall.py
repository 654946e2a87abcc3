"""The stall scene and its figures, which are computed from given times."""

import json
from pathlib import Path

import pytest
import torch

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import named, predict
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.model import Model
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase3_chunked_prefill.lab import stall
from phase3_chunked_prefill.lab.stall import CHUNKS, WHOLE, Outcome, Played, Scene, Stage, judge

SMALL = ModelConfig(
    model_type="qwen3", vocab_size=97, num_hidden_layers=2, hidden_size=32, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_norm=True,
    tie_word_embeddings=True, max_position_embeddings=256, dtype="float32",
)  # fmt: skip
SCENE = Scene(decodes=3, context=5, answer=30, arrives=4, prompt=200)


@pytest.fixture(scope="module")
def stage() -> Stage:
    cpu = torch.device("cpu")
    return Stage(Model.random(SMALL, device=cpu, attend=ATTEND.on(cpu)), SCENE)


def tokens_of(played: Played) -> list[tuple[int, int]]:
    return [(step.prefill_tokens, step.decode_tokens) for step in played.steps]


def test_a_whole_prompt_is_one_step_with_all_decodes(stage: Stage) -> None:
    # An answer of 30 tokens: one of the step before the scene, 29 of the steps in it.
    assert tokens_of(stage.play(WHOLE)) == [(0, 3)] * 4 + [(200, 3)] + [(0, 3)] * 24


@pytest.mark.parametrize(("chunk", "pieces"), [(64, [64, 64, 64, 8]), (40, [32] * 5 + [40]), (16, [16] * 12 + [8])])
def test_decodes_advance_with_every_chunk(stage: Stage, chunk: int, pieces: list[int]) -> None:
    calm, after = [(0, 3)] * 4, [(0, 3)] * (25 - len(pieces))
    assert tokens_of(stage.play(chunk)) == calm + [(piece, 3) for piece in pieces] + after


def test_tokens_do_not_depend_on_the_chunk_size_and_all_pages_are_freed(stage: Stage) -> None:
    answers = []
    for chunk in (WHOLE, 64, 16):
        _, decodes, long = stage.play(chunk)
        assert [len(one.output_tokens) for one in (*decodes, long)] == [30, 30, 30, 1]
        answers.append([one.output_tokens for one in (*decodes, long)])
        assert stage.cache.usage.free == stage.cache.usage.total
        stage.cache.check()
    assert answers[0] == answers[1] == answers[2]


def test_the_pool_has_exactly_the_pages_of_the_scene(stage: Stage) -> None:
    """Three times 35 tokens in pages of 16, and 200."""
    assert stage.cache.usage.total == 3 * 3 + 13


def test_another_prompt_can_be_played_on_the_same_stage(stage: Stage) -> None:
    assert sum(step.prefill_tokens for step in stage.play(16, prompt=50).steps) == 50


def at(moments: list[float], arrival: float = 0.0) -> Request:
    """A request that got its tokens at these times."""
    params = SamplingParams(max_tokens=len(moments))
    request = Request("r", (1, 2), params, arrival=arrival)
    request.admit(arrival)
    request.advance(0, 2)
    for n, moment in enumerate(moments):
        request.append(7, moment)
        if n + 1 < len(moments):
            request.advance(request.computed, 1)
    request.finish(FinishReason.LENGTH, moments[-1])
    return request


def test_gaps_are_counted_from_the_arrival_of_the_long_prompt_to_its_first_token() -> None:
    # It arrives at 10 and has its token at 20. The gap from 20 to 35 comes after that, those up to 10 are calm.
    decodes = [at([7.5, 8.0, 10.0, 14.0, 20.0, 35.0]), at([6.0, 9.0, 11.0, 20.0, 21.0, 30.0])]
    outcome = judge(64, Played([], decodes, at([20.0], arrival=10.0)))
    assert outcome.p99_gap_ms == pytest.approx(8910.0)
    assert outcome == Outcome(
        chunk=64,
        calm_gap_ms=2000.0,  # of 0.5, 2 and 3
        p50_gap_ms=5000.0,  # of 2 (begun at 9), 4, 6 and 9 seconds
        p99_gap_ms=outcome.p99_gap_ms,
        worst_gap_ms=9000.0,
        ttft_ms=10_000.0,
        total_ms=25_000.0,
    )


def test_a_scene_whose_decodes_end_too_early_is_refused() -> None:
    """No decode would wait for the last chunks, which are the slowest."""
    with pytest.raises(ValueError, match="in chunks of 16, had its token"):
        judge(16, Played([], [at([1.0, 5.0, 30.0]), at([1.0, 5.0, 9.0])], at([20.0], arrival=2.0)))


def outcome(chunk: int, worst: float, ttft: float, total: float) -> Outcome:
    return Outcome(chunk, 1.0, worst, worst, worst, ttft, total)


def test_the_best_of_each_chunk_size_is_the_run_that_took_least(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([outcome(0, 90, 90, 100), outcome(8, 9, 95, 120), outcome(0, 80, 80, 110), outcome(8, 12, 95, 105)])
    monkeypatch.setattr(stall, "judge", lambda chunk, played: next(runs))
    best = stall.measure(stage, (0, 8), range(2))
    assert [(o.chunk, o.total_ms) for o in best] == [(0, 100), (8, 105)]
    cut = stall.compared(best)["chunk_8"]
    assert (cut["times_shorter"], cut["longer"]) == (90 / 12, pytest.approx(0.05))
    assert cut["later_first_token"] == pytest.approx(95 / 90 - 1)


def test_the_measured_scene_lasts_at_every_chunk_size() -> None:
    """In the scene of `main` decodes outlast the longest prompt of the shape, also with the smallest chunk."""
    scene, longest = Scene(), SHAPES["17m"].max_position_embeddings - 1
    steps = -(-longest // min(chunk for chunk in CHUNKS if chunk != WHOLE))
    assert 1 + scene.arrives + steps <= scene.answer


def test_the_cost_model_predicts_shorter_steps_with_chunks_on_a_large_gpu() -> None:
    """At 2,048 tokens a step, an 8B model's worst step on an H100 is five times shorter and the sum hardly larger."""
    qwen3_8b = ModelConfig(
        model_type="qwen3", vocab_size=151_936, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096,
        intermediate_size=12_288, qk_norm=True,
    )  # fmt: skip
    cost, device, decodes = CostModel(qwen3_8b), named("H100 SXM"), [(512, 1)] * 8

    def seconds(pieces: list[tuple[int, int]]) -> float:
        return predict(cost.pieces([*decodes, *pieces]), device).seconds

    whole = seconds([(0, 32_768)])
    cut = [seconds([(start, 2048)]) for start in range(0, 32_768, 2048)]
    assert whole / max(cut) > 5
    assert sum(cut) < 1.15 * (whole + (len(cut) - 1) * seconds([]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "256"], "prompt makes 257 tokens, and the context of the model has 256"),
        (["--prompt", "0"], "prompt must be at least 1, got 0"),
        (["--runs", "0"], "--runs must be at least 1, got 0"),
        (["--shape", "3b"], "invalid choice: '3b'"),
    ],
)
def test_bad_options_are_named(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "17m", SMALL)
    with pytest.raises(SystemExit, match="2"):
        stall.main(options)
    assert words in capsys.readouterr().err


def test_the_command_writes_every_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "17m", SMALL)
    monkeypatch.setattr(stall, "CHUNKS", (WHOLE, 64, 32))
    monkeypatch.setattr(stall, "Scene", lambda prompt: Scene(2, 4, 40, 4, prompt))
    stall.main(["--runs", "1", "--json", str(tmp_path / "stall.json")])
    result = json.loads((tmp_path / "stall.json").read_text())
    assert result["figures"]["scene"] == {"decodes": 2, "context": 4, "answer": 40, "arrives": 4, "prompt": 255}
    outcomes = result["figures"]["outcomes"]
    assert [outcomes[name]["chunk"] for name in ("whole", "chunk_64", "chunk_32")] == [0, 64, 32]
    assert all(o["calm_gap_ms"] > 0 and o["worst_gap_ms"] >= o["p50_gap_ms"] > 0 for o in outcomes.values())
    assert outcomes["whole"]["times_shorter"] == 1
    shown = capsys.readouterr().out
    assert "a prompt of 255 tokens arrives" in shown
    assert len([line for line in shown.splitlines() if "x less" in line]) == 2
