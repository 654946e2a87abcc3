import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase2_prefill_decode.lab import roofline
from phase2_prefill_decode.lab.cost import Cost, CostModel, Part
from phase2_prefill_decode.lab.roofline import DEVICES, Device, crossover, measured, named, predict
from phase2_prefill_decode.loading.config import ModelConfig

QWEN3_8B = ModelConfig(
    vocab_size=151936,
    num_hidden_layers=36,
    num_attention_heads=32,
    hidden_size=4096,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    qk_norm=True,
)
TEN = Device("ten operations a byte", 1000.0, 100.0, overhead=0.5)


def test_each_part_has_its_own_roof() -> None:
    """By hand: one part takes a second for memory, one two seconds for arithmetic; their sum is below the ridge."""
    cost = Cost(attention=Part(operations=100, kv_read=100), down=Part(operations=2000, weights=10, activations=10))
    prediction = predict(cost, TEN)
    assert prediction.parts["attention"].bound == "memory"
    assert prediction.parts["down"].bound == "compute"
    assert prediction.seconds == pytest.approx(0.5 + 1 + 2)
    assert prediction.bound == "compute"
    assert prediction.seconds > 0.5 + max(cost.operations / 1000, cost.bytes / 100)
    assert predict(Cost(down=Part(operations=100)), TEN).bound == "overhead"


@given(st.floats(0.01, 1000))
def test_the_roof_bends_at_the_ridge(intensity: float) -> None:
    assert TEN.ridge == 10
    assert TEN.attainable(intensity) == pytest.approx(1000 if intensity >= 10 else 100 * intensity)


@given(
    st.sampled_from(sorted(DEVICES)),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 500)), min_size=1, max_size=5),
)
def test_no_part_is_faster_than_its_roof(name: str, pieces: list[tuple[int, int]]) -> None:
    device, cost = named(name), CostModel(QWEN3_8B).pieces(pieces)
    prediction = predict(cost, device)
    for part, time in prediction.parts.items():
        counted = cost.parts[part]
        assert counted.operations / time.seconds <= device.attainable(counted.intensity) * (1 + 1e-9)
        assert time.bound == ("compute" if counted.intensity > device.ridge else "memory")
    floor = max(cost.operations / device.flops, cost.bytes / device.bytes_per_second)
    assert prediction.seconds >= floor * (1 - 1e-9)


@pytest.mark.proof
@pytest.mark.parametrize("name", DEVICES)
def test_prefill_is_bound_by_arithmetic_and_decode_by_memory(name: str) -> None:
    device, model = named(name), CostModel(QWEN3_8B)
    prefill, decode = predict(model.pieces([(0, 4096)]), device), predict(model.pieces([(4096, 1)] * 8), device)
    assert prefill.bound == "compute"
    assert {part: time.bound for part, time in prefill.parts.items()} == {
        "qkv": "compute",
        "attention": "compute",
        "out": "compute",
        "gate_up": "compute",
        "down": "compute",
        "head": "memory",  # one row of 4,096
        "pointwise": "memory",
    }
    assert decode.bound == "memory"
    assert {time.bound for time in decode.parts.values()} == {"memory"}


@pytest.mark.parametrize("name", DEVICES)
def test_the_crossover_is_the_first_batch_with_compute_bound_linears(name: str) -> None:
    device, model = named(name), CostModel(QWEN3_8B)
    batch = crossover(model, device)
    assert batch is not None

    def arithmetic_takes_longer(batch: int) -> bool:
        linears = model.pieces([(100, 1)] * batch).linears
        return linears.operations / device.flops >= linears.bytes / device.bytes_per_second

    assert [arithmetic_takes_longer(batch + i) for i in (-2, -1, 0, 1)] == [False, False, True, True]
    assert device.ridge < batch < 1.5 * device.ridge


def test_some_models_never_cross() -> None:
    narrow = CostModel(
        ModelConfig(vocab_size=9, num_hidden_layers=1, num_attention_heads=1, hidden_size=8, intermediate_size=16)
    )
    assert crossover(narrow, named("H200")) is None


def test_an_h200_is_predicted_as_its_datasheet_says() -> None:
    """A decode step of Qwen3-8B: 3.15 ms for weights and 30.7 us for each thousand cached tokens, and little more."""
    model, device = CostModel(QWEN3_8B), named("H200")
    for batch, context in ((1, 1000), (16, 4000), (64, 2000)):
        floor = 3.15e-3 + 30.7e-6 * batch * context / 1000
        predicted = predict(model.pieces([(context, 1)] * batch), device).seconds
        assert floor * 0.999 < predicted < floor * 1.05


def test_a_measured_device_is_read_from_the_file(tmp_path: Path) -> None:
    best = {
        "gflops_bfloat16": 1500.0,
        "gflops_float32": 500.0,
        "copy_gb_per_second": 30.0,
        "read_gb_per_second": 20.0,
        "call_us": 2.0,
    }
    result = {"device": "a machine", "figures": {"best": best}}
    file = tmp_path / "ceilings.json"
    file.write_text(json.dumps(result))
    assert measured(file) == measured(str(file)) == measured(result) == Device("a machine", 1.5e12, 20e9)
    model = CostModel(QWEN3_8B)
    device = measured(result, "float32", model.calls)
    assert (device.flops, device.overhead) == (0.5e12, pytest.approx(model.calls * 2e-6))
    with pytest.raises(ValueError, match="no matrix product was measured in 'int8', only in bfloat16, float32"):
        measured(result, "int8")


def test_a_bad_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no datasheet for 'H20'; known are H200, H100 SXM"):
        named("H20")
    for flops, bandwidth, overhead in ((0, 1, 0), (1, 0, 0), (1, 1, -1), (float("nan"), 1, 0)):
        with pytest.raises(ValueError, match="speed above 0"):
            Device("broken", flops, bandwidth, overhead)


def test_predicting_needs_no_torch() -> None:
    """Imports the modules alone, without the rest of the package."""
    program = """
import sys, types
package = types.ModuleType("phase2_prefill_decode")
package.__path__ = [sys.argv[1]]
sys.modules["phase2_prefill_decode"] = package
import phase2_prefill_decode.lab.cost, phase2_prefill_decode.lab.roofline
print({"torch", "triton", "transformers", "numpy"} & set(sys.modules))
"""
    package = str(Path(roofline.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", program, package], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
