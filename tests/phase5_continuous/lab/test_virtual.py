from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phase0_request import Batch, Slice
from phase0_request.core import EngineCore
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.lab.cost import CostModel, Load
from phase2_prefill_decode.lab.roofline import DEVICES, Device, predict
from phase2_prefill_decode.lab.shapes import SHAPES
from phase5_continuous.lab.traces import EOS, WORD
from phase5_continuous.lab.virtual import StepTimes, VirtualClock, VirtualRunner
from phase5_continuous.scheduler import Scheduler
from tests.phase5_continuous.support import request

MODELS = (CostModel(SHAPES["17m"]), CostModel(replace(SHAPES["596m"], sliding_windows=(128,) * 28)))


def test_a_prefill_after_a_preemption_yields_a_token_only_with_its_last_chunk() -> None:
    runner = VirtualRunner(StepTimes(CostModel(SHAPES["17m"]), DEVICES["L4"]), VirtualClock())
    runner.answers = {"back": 5, "ends": 4}
    pieces = []
    for name in runner.answers:
        one = request(name, 4)
        one.output_tokens += [WORD] * 3
        pieces += [Slice(one, 0, 6), Slice(one, 6, 1)]
    step = runner.pack(Batch(tuple(pieces)))
    assert (step.tokens, step.yields) == ([None, WORD, None, EOS], 2)


@given(
    model=st.sampled_from(MODELS),
    device=st.sampled_from([*DEVICES.values(), Device("slow", 1e9, 1e9, 0.001)]),
    load=st.builds(Load, st.integers(1, 20_000), st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 1000)),
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_step_times_are_what_the_roofline_predicts(model: CostModel, device: Device, load: Load) -> None:
    assert StepTimes(model, device).seconds(load) == pytest.approx(predict(model.cost(load), device).seconds, rel=1e-9)


def test_a_step_advances_the_clock_by_the_cost_of_its_batch() -> None:
    model, device, clock = CostModel(SHAPES["17m"]), DEVICES["L4"], VirtualClock()
    runner = VirtualRunner(StepTimes(model, device), clock)
    core = EngineCore(Scheduler(PagedCache(64, 16), [EOS]), runner, clock)
    for number in range(3):
        one = request(f"r{number}", 300 + number, 9, ignore_eos=False)
        runner.answers[one.id] = 3 + number
        core.submit(one)
    wanted = 0.0
    while core.has_work:
        if step := core.launch():
            wanted += predict(model.step(step.batch), device).seconds
            core.complete()
        core.scheduler.drain()
    assert clock.now == pytest.approx(wanted)


def test_a_step_with_a_prompt_takes_the_host_its_launches_and_a_recorded_step_of_decodes_none() -> None:
    times, clock = StepTimes(CostModel(SHAPES["17m"]), DEVICES["L4"]), VirtualClock()
    decoding, prefilling = request("a", 4), request("b", 4)
    decoding.output_tokens.append(WORD)
    decode, mixed = [Slice(decoding, 4, 1)], [Slice(decoding, 4, 1), Slice(prefilling, 0, 4)]
    decode_seconds, mixed_seconds = (
        times.seconds(times.load([(4, 1)], 1)),
        times.seconds(times.load([(4, 1), (0, 4)], 2)),
    )
    for launch, slices, takes in ((0.5, decode, decode_seconds), (0.5, mixed, 0.5), (1e-9, mixed, mixed_seconds)):
        runner = VirtualRunner(times, clock, launch)
        runner.answers = {"a": 5, "b": 5}
        start = clock.now
        runner.launch(runner.pack(Batch(tuple(slices))))
        assert clock.now - start == pytest.approx(takes)
