import pytest

from phase2_prefill_decode.lab.cost import Cost, CostModel, Part
from phase2_prefill_decode.lab.roofline import DEVICES, Device, crossover, named, predict
from tests.phase2_prefill_decode.lab.test_cost import QWEN3_8B

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


@pytest.mark.proof
@pytest.mark.parametrize("name", DEVICES)
def test_prefill_is_bound_by_arithmetic_and_decode_by_memory(name: str) -> None:
    device, model = named(name), CostModel(QWEN3_8B)
    prefill, decode = predict(model.pieces([(0, 4096)]), device), predict(model.pieces([(4096, 1)] * 8), device)
    assert (prefill.bound, decode.bound) == ("compute", "memory")
    assert {part for part, time in prefill.parts.items() if time.bound == "memory"} == {"head", "pointwise"}
    assert {time.bound for time in decode.parts.values()} == {"memory"}


def test_an_h100_s_cache_holds_all_activations_of_256_decodes_but_the_logits() -> None:
    """By hand, for a model of 8B: a step takes at least as long as its bytes take to cross the memory."""
    device = named("H100 SXM")
    matrices = 36 * 4096 * (6144 + 4096 + 24576 + 12288) + 4096 * 151_936
    others = 36 * (2 * 4096 + 2 * 128) + 4096 + 256 * 4096  # norms, and a row of the embedding for each token
    kv, logits = 36 * 2 * 8 * 128, 256 * (4096 + 151_936)  # of a token; what the head reads and writes
    crossing = 2 * (matrices + others + 256 * 1123 * kv + 256 * kv + logits)  # keys and values are read and written
    every, cached = (CostModel(QWEN3_8B, cache=cache).pieces([(1122, 1)] * 256) for cache in (0, device.cache))
    assert predict(cached, device).seconds == pytest.approx(crossing / 3.35e12)
    assert predict(every, device).seconds / predict(cached, device).seconds == pytest.approx(1.049, abs=0.001)


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
