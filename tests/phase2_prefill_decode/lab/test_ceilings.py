import json
from itertools import count
from pathlib import Path

import pytest
import torch

from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.lab.roofline import measured
from phase2_prefill_decode.threads import cores


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "SIZES", {"cpu": (32, 64)})
    monkeypatch.setattr(ceilings, "OUT_OF_CACHE", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "WIDTH", 256)
    monkeypatch.setattr(ceilings, "READS", 3)
    monkeypatch.setattr("phase1_kv_pool.lab.timing.SECONDS", 0.0)


@pytest.mark.usefixtures("small")
def test_it_records_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ceilings.json"
    ceilings.main(["--device", "cpu", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase2_prefill_decode.lab ceilings --device cpu"
    figures, best = result["figures"], result["figures"]["best"]
    products, memory = figures["matrix_product_gflops"], figures["memory_gb_per_second"]
    assert set(products) == {f"{dtype}_{size}" for dtype in ("bfloat16", "float32") for size in (32, 64)}
    assert set(memory) == {"copy", "sum", "matrix_vector_bfloat16", "matrix_vector_float32"}
    assert min(*products.values(), *memory.values(), best["call_us"]) > 0
    assert best["gflops_float32"] == max(products["float32_32"], products["float32_64"])
    assert best["read_gb_per_second"] == max(rate for name, rate in memory.items() if name != "copy")
    spread = figures["read_spread_gb_per_second"]
    assert 0 < spread["least"] <= spread["median"] <= spread["most"] == memory["sum"]
    assert (spread["reads"], figures["threads"]) == (9, cores())
    for dtype in ("bfloat16", "float32"):
        device = measured(file, dtype)
        assert device.flops == best[f"gflops_{dtype}"] * 1e9
        assert device.name == result["device"]
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("matrix product", "copy", "read", "call", "memory is the roof"))


@pytest.mark.usefixtures("small")
def test_the_measured_weight_has_the_stated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[torch.Tensor] = []
    linear = ceilings.Linear
    monkeypatch.setattr(ceilings, "Linear", lambda weight: weights.append(weight) or linear(weight))
    assert len(dict(ceilings._memory(torch.device("cpu")))) == 3
    assert [(weight.dtype, weight.nbytes) for weight in weights] == [
        (torch.bfloat16, 1 << 20),
        (torch.float32, 1 << 20),
    ]


@pytest.mark.usefixtures("small")
def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which every call takes one second, a rate is the work of one call."""
    monkeypatch.setattr(ceilings, "_seconds", lambda device, calls: float(len([call() for call in calls])))
    monkeypatch.setattr(ceilings.time, "perf_counter", count(0.0, 1.0).__next__)
    figures = ceilings.measure(torch.device("cpu"))
    assert figures["matrix_product_gflops"]["bfloat16_64"] == pytest.approx(2 * 64**3 / 1e9)
    size = (1 << 20) / 1e9
    rates = {"copy": 2 * size, "sum": size, "matrix_vector_bfloat16": size, "matrix_vector_float32": size}
    assert figures["memory_gb_per_second"] == pytest.approx(rates)


def test_a_device_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        ceilings.main(["--device", "cuda"])
    assert "sees no GPU here" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_all_cores_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of threads torch was set to; afterwards it is that number again."""
    used: set[int] = set()
    seconds = ceilings._seconds
    monkeypatch.setattr(
        ceilings, "_seconds", lambda device, calls: used.add(torch.get_num_threads()) or seconds(device, calls)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ceilings.measure(torch.device("cpu"))
        assert used == {cores()}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
