"""The capacity of a device, against sums by hand for a machine with round numbers."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.fits import MODELS, weight_bytes
from phase2_prefill_decode.lab.roofline import Device, named
from phase6_integration.lab.scale.capacity import FOR_PAGES, Question, capacity, main

CONFIG = MODELS["Qwen3-8B"]
WEIGHTS = weight_bytes(CONFIG, "bfloat16")
KV = 36 * 2 * 8 * 128 * 2  # bytes per token: layers, K and V, heads, numbers, bytes
MEMORY_BOUND = Device("reads only", 1e30, 1e12)


def test_memory_ends_it_where_the_itl_does_not() -> None:
    found = capacity(CostModel(CONFIG), MEMORY_BOUND, 80e9, Question(itl=1.0))
    assert found.requests == found.fit == (FOR_PAGES * 80e9 - WEIGHTS) // (KV * 2048)
    read = WEIGHTS + found.requests * KV * 1536
    assert found.step_ms == pytest.approx(1e3 * read / 1e12, rel=0.1), "weights, keys and values; few activations"
    assert found.dollars_per_million == pytest.approx(2.5 / 3600 / found.tokens_per_second * 1e6)


def test_the_itl_ends_it_before() -> None:
    most = capacity(CostModel(CONFIG), MEMORY_BOUND, 80e9, Question(itl=1.0))
    asked = Question(itl=0.9 * most.itl_ms / 1e3)
    found = capacity(CostModel(CONFIG), MEMORY_BOUND, 80e9, asked)
    assert 0 < found.requests < most.fit
    assert found.itl_ms <= 1e3 * asked.itl
    assert found.dollars_per_million > most.dollars_per_million, "a tighter SLO costs more"


def test_a_server_that_reaches_half_takes_twice_as_long() -> None:
    whole, half = (capacity(CostModel(CONFIG), MEMORY_BOUND, 80e9, Question(itl=1.0, reached=r)) for r in (1.0, 0.5))
    assert half.itl_ms == pytest.approx(2 * whole.itl_ms)


def test_a_named_device_is_asked_with_its_cache(tmp_path: Path) -> None:
    device = named("H100 SXM")
    assert main(["--device", device.name, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert found == asdict(capacity(CostModel(CONFIG, cache=device.cache), device, 80e9, Question()))
    assert found["step_ms"] < capacity(CostModel(CONFIG), device, 80e9, Question()).step_ms


def test_what_cannot_be_served_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "Qwen3-32B", "--device", "L4"])
    assert "not one request of 2048 tokens: 0 fit" in capsys.readouterr().err
    assert main([]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out
