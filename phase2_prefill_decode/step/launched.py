"""LaunchedStep: a step that may still be on the device, and its result on the way to the host."""

import math

import torch

from phase0_request.batch import NO_TOKEN_LEFT, StepOutput
from phase2_prefill_decode.sampling.sampler import Sampled
from phase2_prefill_decode.step.packed import PackedStep


class LaunchedStep:
    """The result of a step."""

    def __init__(self, step: PackedStep, sampled: Sampled) -> None:
        """Start to copy the result to the host: a GPU copies it while the next step is launched."""
        self.step = step
        self._sampled = sampled.to_host()  # a recorded step writes its result to the same place again
        self._output: StepOutput | None = None
        self._copied = None
        if sampled.tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    # region output
    def output(self) -> StepOutput:
        """Wait for the result. May be called repeatedly."""
        if self._output is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._output = self._read()
        return self._output

    def _read(self) -> StepOutput:
        """The token of each slice, from the first of its rows. Further rows belong to tokens beyond the
        request; processors read them."""
        tokens, peaks = self._sampled.tokens.tolist(), self._sampled.peaks.tolist()
        output, last = StepOutput([None] * self.step.slices), None
        for number, token, peak in zip(self.step.drawn, tokens, peaks, strict=False):
            if number == last:
                continue
            last = number
            if math.isfinite(peak):
                output.tokens[number] = token
            else:
                output.failed[number] = _reason(peak)
        for work in self.step.sampling.works:
            work.finish(output, tokens, peaks)
        return output

    # endregion


def _reason(peak: float) -> str:
    """Why no token can be drawn from a row, if its largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return NO_TOKEN_LEFT
