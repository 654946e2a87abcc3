from phase0_request import Batch, Slice
from phase2_prefill_decode.cost import CostModel
from phase2_prefill_decode.roofline import DEVICES
from phase2_prefill_decode.shapes import SHAPES
from phase5_continuous.traces import EOS, WORD
from phase5_continuous.virtual import StepTimes, VirtualClock, VirtualRunner
from tests.phase5_continuous.support import request


def test_what_is_computed_again_after_a_preemption_says_nothing_before_its_end() -> None:
    runner = VirtualRunner(StepTimes(CostModel(SHAPES["17m"]), DEVICES["L4"]), VirtualClock())
    runner.answers = {"back": 5, "ends": 4}
    pieces = []
    for name in runner.answers:
        one = request(name, 4)
        one.output_tokens += [WORD] * 3
        pieces += [Slice(one, 0, 6), Slice(one, 6, 1)]
    step = runner.pack(Batch(tuple(pieces)))
    assert (step.tokens, step.drawn) == ([None, WORD, None, EOS], [1, 3])
