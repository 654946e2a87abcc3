"""LaunchedStep: a step that may still be on the device, and its result on the way to the host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch

from phase0_request.batch import NO_TOKEN_LEFT, Forced, StepOutput, Verified, WaitHandle
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
        failed: dict[int, str] = {}  # dict[int, str]() would take a microsecond
        logprobs: dict[int, TokenLogprobs] = {}
        verified: dict[int, list[Verified]] = {}
        of_rows: dict[int, TokenLogprobs] = {}
        if sampled.logprobs is not None:
            asked = (row for row, _ in step.sampling.logprobs)
            of_rows = dict(zip(asked, sampled.logprobs.read(), strict=True))
        accepted = self._accepted(tokens, peaks) if step.max_seqlen_q > 1 else ()
        for row, (number, token, peak) in enumerate(zip(step.drawn, tokens, peaks, strict=False)):
            if row in accepted:
                verified.setdefault(number, []).append(Verified(token, of_rows.get(row)))
            elif step.verifies(row):
                continue  # rejected
            elif not math.isfinite(peak):
                failed[number] = _reason(peak)
            else:
                drawn[number] = token
                if row in of_rows:
                    logprobs[number] = of_rows[row]
        of_prompts = (of_token for block in sampled.prompt_logprobs for of_token in block.read())
        counts = step.prompt.counts if step.prompt is not None else ()
        scores = {number: list(islice(of_prompts, count)) for number, count in enumerate(counts) if count}
        for number, of_prompt in scores.items():
            if any(math.isnan(of_token.logprob) for of_token in of_prompt):
                failed.setdefault(number, "its prompt cannot be scored: there is NaN among the logits")
        states = () if sampled.hidden is None else sampled.hidden.numpy()
        embeddings = {step.drawn[row]: state.tobytes() for row, state in zip(step.sampling.embeds, states, strict=True)}
        return self._follow(StepOutput(drawn, failed, logprobs, scores, verified=verified, embeddings=embeddings))

    # region exercise 2.29
    def _accepted(self, tokens: Sequence[int], peaks: Sequence[float]) -> set[int]:
        """The rows behind a draft that is accepted: it is the token that was drawn from the row before it, and that row
        counts too. A draw depends on the logits, the seed and the position alone, so each is what it would have been
        without drafts. A row that gives no token ends the run: what goes before it is right."""
        step, rows, counts = self.step, set[int](), False
        for row in range(len(step.drawn)):
            verifies = step.verifies(row)
            counts = math.isfinite(peaks[row]) and (not verifies or counts)
            counts = counts and (not verifies or step.tokens[step.last[row]] == tokens[row - 1])
            if verifies and counts:
                rows.add(row)
        return rows

    # endregion

    def _follow(self, output: StepOutput) -> StepOutput:
        """Pass the drawn tokens to edits and constraints, and add the tokens that grammars force after them."""
        step, sampling = self.step, self.step.sampling
        for row, edits, index in sampling.edits:
            token = output.tokens[step.drawn[row]]
            if token is not None and not step.verifies(row):
                edits.take(index, token)
        if not sampling.masks:
            return output
        failed, late, followed = dict(output.failed), dict[int, WaitHandle](), []
        for row, constraint, index, _ in sampling.masks:
            number = step.drawn[row]
            token = output.tokens[number]
            if row in self._late and failed.get(number) == NO_TOKEN_LEFT:  # its mask is empty
                late[number] = self._late[row]
                del failed[number]
            elif token is None:
                failed[number] = constraint.error or failed[number]
            else:
                tokens = [token, *(verified.token for verified in output.verified.get(number, ()))]
                for place, drawn in enumerate(tokens, index):
                    constraint.take(place, drawn)
                followed.append((number, constraint, index + len(tokens) - 1))
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
