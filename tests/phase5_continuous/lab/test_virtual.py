import pytest

from phase0_request import Batch, Slice
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import DEVICES
from phase2_prefill_decode.lab.shapes import SHAPES
from phase5_continuous.lab.traces import WORD
from phase5_continuous.lab.virtual import StepTimes, VirtualClock, VirtualRunner
from tests.phase5_continuous.support import request


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
