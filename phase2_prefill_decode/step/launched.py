"""LaunchedStep: a step that may still be on the device, and its result on the way to the host."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import torch

from phase0_request.batch import NO_TOKEN_LEFT, Forced, StepOutput, WaitHandle
from phase0_request.request import TokenLogprobs
from phase2_prefill_decode.sampling.sampler import Sampled
from phase2_prefill_decode.step.packed import PackedStep


class LaunchedStep:
    """The result of a step. Constraints and penalties follow its tokens."""

    def __init__(self, step: PackedStep, sampled: Sampled, late: Mapping[int, WaitHandle] | None = None) -> None:
        """Start to copy the result to the host: a GPU copies it while the next step is launched. `late` are the rows
        without a mask in time."""
        self.step = step
        self._sampled = sampled.to_host()  # a recorded step writes its result to the same place again
        self._late = late or {}
        self._copied = None
        if sampled.tokens.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def output(self) -> StepOutput:
        """Wait for the result. May be called repeatedly."""
        if self._copied is not None:
            self._copied.synchronize()
        step, sampled = self.step, self._sampled
        tokens, peaks = sampled.tokens.tolist(), sampled.peaks.tolist()
        drawn: list[int | None] = [None] * step.slices
        failed = {}
        for number, token, peak in zip(step.drawn, tokens, peaks, strict=False):  # a recorded step may have more rows
            if math.isfinite(peak):
                drawn[number] = token
            else:
                failed[number] = _reason(peak)
        logprobs: dict[int, TokenLogprobs] = {}
        if sampled.logprobs is not None:
            asked = [step.drawn[row] for row, _ in step.sampling.logprobs]
            of_rows = zip(asked, sampled.logprobs.read(), strict=True)
            logprobs = {number: of_row for number, of_row in of_rows if number not in failed}
        of_prompts = (of_token for block in sampled.prompt_logprobs for of_token in block.read())
        counts = step.prompt.counts if step.prompt is not None else ()
        scores = {number: list(islice(of_prompts, count)) for number, count in enumerate(counts) if count}
        for number, of_prompt in scores.items():
            if any(math.isnan(of_token.logprob) for of_token in of_prompt):
                failed.setdefault(number, "its prompt cannot be scored: there is NaN among the logits")
        return self._follow(StepOutput(drawn, failed, logprobs, scores))

    def _follow(self, output: StepOutput) -> StepOutput:
        """Pass the drawn tokens to edits and constraints, and add the tokens that grammars force after them."""
        step, sampling = self.step, self.step.sampling
        for row, edits, index in sampling.edits:
            token = output.tokens[step.drawn[row]]
            if token is not None:
                edits.take(index, token)
        if not sampling.masks:
            return output
        failed, late, followed = dict(output.failed), dict[int, WaitHandle](), []
        for row, constraint, index in sampling.masks:
            number = step.drawn[row]
            token = output.tokens[number]
            if row in self._late and failed.get(number) == NO_TOKEN_LEFT:  # its mask is empty
                late[number] = self._late[row]
                del failed[number]
            elif token is None:
                failed[number] = constraint.error or failed[number]
            else:
                constraint.take(index, token)
                followed.append((number, constraint, index))
        forced = dict[int, Forced]()
        for number, constraint, index in followed:  # when all have their tokens: they may work side by side
            follows = constraint.forced(index)
            if follows is not None:
                forced[number] = follows
        return replace(output, failed=failed, forced=forced, late=late)


def _reason(peak: float) -> str:
    """Why no token can be drawn from a row, if its largest logit is not finite."""
    if math.isnan(peak):
        return "no token can be drawn: there is NaN among the logits"
    if peak > 0:
        return "no token can be drawn: there is +inf among the logits"
    return NO_TOKEN_LEFT
