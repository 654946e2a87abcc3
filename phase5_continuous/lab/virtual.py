"""A simulated runner: steps take the time that the cost model predicts, and answers have the lengths of the trace."""

from dataclasses import dataclass

from phase0_request.batch import Batch, StepOutput
from phase2_prefill_decode.lab.cost import CostModel, Load
from phase2_prefill_decode.lab.roofline import Device
from phase5_continuous.lab.traces import EOS, WORD


@dataclass(slots=True)
class VirtualClock:
    """A clock that advances only when it is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class StepTimes:
    """`predict(model.cost(load), device).seconds` for any load, as a few sums.

    The cost of every part is linear in the load, separately with and without tokens to sample. So its slopes are taken
    from the model once, which makes a step a hundred times cheaper to predict. That is not so of experts.
    """

    def __init__(self, model: CostModel, device: Device) -> None:
        if not model.linear:
            raise ValueError("times of a model with experts or a cache are not linear in the load: `predict` each step")
        self.load = model.load
        self.overhead = device.overhead
        self._parts = [self._slopes(model, device, yields) for yields in (0, 1)]

    def seconds(self, load: Load) -> float:
        """Predict the least time of a step with this load."""
        tokens, pairs, keys, yields, states = load
        if not tokens:
            return self.overhead
        total = self.overhead
        for compute, memory in self._parts[yields > 0]:
            total += max(
                compute[0] + compute[1] * tokens + compute[2] * pairs + compute[3] * keys + compute[4] * yields,
                memory[0]
                + memory[1] * tokens
                + memory[2] * pairs
                + memory[3] * keys
                + memory[4] * yields
                + memory[5] * states,
            )
        return total

    @staticmethod
    def _slopes(model: CostModel, device: Device, yields: int) -> list[tuple[list[float], list[float]]]:
        """For each part the seconds of arithmetic and of memory: a constant, and a slope for each field of the load."""
        origin = Load(1, 0, 0, yields)
        ahead = [origin._replace(**{name: getattr(origin, name) + 1}) for name in Load._fields]
        costs = [[*model.cost(load).parts.values()] for load in (origin, *ahead)]
        found = []
        for at_origin, *others in zip(*costs, strict=True):
            both = []
            for name, speed in (("operations", device.flops), ("bytes", device.bytes_per_second)):
                first = getattr(at_origin, name)
                slopes = [getattr(other, name) - first for other in others]
                if not yields:
                    slopes[3] = 0
                constant = first - slopes[0] - yields * slopes[3]
                both.append([amount / speed for amount in (constant, *slopes)])
            found.append((both[0], both[1]))
        return found


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """A packed step. Its tokens are known already."""

    batch: Batch
    tokens: list[int | None]
    yields: int  # how many slices complete their requests

    def output(self) -> StepOutput:
        return StepOutput(self.tokens)


class VirtualRunner:
    """Yields filling, and EOS as the last token of each answer. A step advances the clock.

    `launch` is the host's time to launch a step with a prompt, kernel by kernel: it takes the longer of that and its
    time on the device. Steps of decodes are recorded, and launching one takes no time.
    """

    def __init__(self, times: StepTimes, clock: VirtualClock, launch: float = 0.0) -> None:
        self.times = times
        self.clock = clock
        self.launch_seconds = launch
        self.answers: dict[str, int] = {}  # by request id, the tokens of its answer

    def pack(self, batch: Batch) -> VirtualStep:
        tokens: list[int | None] = []
        for request, start, length, _ in batch.slices:
            last = len(request.output_tokens) + 1 >= self.answers[request.id]
            tokens.append(None if start + length < request.total else EOS if last else WORD)
        return VirtualStep(batch, tokens, len(tokens) - tokens.count(None))

    def launch(self, step: VirtualStep) -> VirtualStep:
        load = self.times.load([piece[1:3] for piece in step.batch.slices], step.yields)
        recorded = load.tokens == len(step.tokens)
        self.clock.now += max(self.times.seconds(load), 0.0 if recorded else self.launch_seconds)
        return step
