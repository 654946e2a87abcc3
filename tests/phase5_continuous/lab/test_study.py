"""The study: the same requests for both engines, and the figures that the chapter quotes."""

import json
from pathlib import Path

import pytest

from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.model import Model
from phase5_continuous.lab import study

VOCABULARY = SHAPES["17m"].vocab_size


@pytest.fixture(scope="module")
def model() -> Model:
    return study.model_of("17m")


def test_the_workload_is_the_same_every_time_and_lengths_are_not_known_beforehand() -> None:
    prompts, params = study.workload(VOCABULARY, 50)
    assert (prompts, params) == study.workload(VOCABULARY, 50)
    assert prompts != study.workload(VOCABULARY, 50, seed=1)[0]
    assert all(8 <= len(prompt) <= 512 for prompt in prompts)
    assert {one.max_tokens for one in params} == {study.MOST}  # so the limit does not give the length away
    assert all(1 <= len(one.stop_token_ids) <= 128 for one in params)


def test_each_engine_serves_the_whole_set(model: Model) -> None:
    static, continuous = (study.serve(model, way, 3) for way in ("static", "continuous"))
    assert static.requests == continuous.requests == 3
    assert static.preemptions == 0
    for one in (static, continuous):
        assert one.tokens == round(one.mean_tokens * 3)
        assert one.longest <= study.MOST
        assert one.ttft_p50_ms <= one.ttft_p99_ms <= one.seconds * 1e3
        assert one.tokens_per_second == pytest.approx(one.tokens / one.seconds)


def test_the_figures_are_computed_from_the_times_of_the_requests() -> None:
    first, second = (Request(name, (1, 2), arrival=0.0) for name in "ab")
    for request, times in ((first, (1.0, 2.0)), (second, (3.0, 4.0, 5.0))):
        request.admit(0.0)
        for number, at in enumerate(times):
            request.advance(request.computed, 1 if number else 2)
            request.append(7, at)
        request.finish(FinishReason.LENGTH, times[-1])
    found = study.judge([first, second], preemptions=3)
    assert (found.tokens, found.seconds, found.tokens_per_second) == (5, 5.0, 1.0)
    assert found.ttft_p99_ms == pytest.approx(3000, rel=0.02)
    assert (found.longest, found.mean_tokens, found.preemptions) == (3, 2.5, 3)


def test_the_memory_of_a_simulation_excludes_that_of_its_parent() -> None:
    ballast = bytearray(b"1") * (256 << 20)
    found = study.many(20)
    assert found["requests"] == 20
    assert 10 < found["peak_mib"] < len(ballast) >> 20


def test_it_writes_the_figures_that_the_chapter_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = study.Measured(2, 10, 1.0, 10.0, 5.0, 9.0, 5.0, 6, 0)
    two = study.Measured(2, 10, 0.5, 20.0, 5.0, 3.0, 5.0, 6, 1)
    monkeypatch.setattr(study, "serve", lambda model, way, count: one if way == "static" else two)
    study.main(["--requests", "2", "--runs", "1", "--many", "0", "--json", str(tmp_path / "f")])
    figures = json.loads((tmp_path / "f").read_text())["figures"]
    assert figures["measured"]["throughput_ratio"] == 2
    assert figures["measured"]["ttft_p99_ratio"] == 3
    assert "2.0 times the tokens a second" in capsys.readouterr().out
