"""What an engine's process reports about a request beside tokens: logprobs, the embedding, and how its drafts did."""

from typing import Any
from weakref import WeakSet

from phase0_request.core import EngineCore
from phase0_request.request import Request
from phase2_prefill_decode.extras.outcome import RequestExtras, extras_of
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.loop_hooks import LoopHooks, Send
from phase6_integration.extras.fields.token_details import Report, encode


def reports(_: EngineCore[Scheduler, Any], __: Send) -> LoopHooks:
    told: WeakSet[Request] = WeakSet()  # whose logprobs of the prompt are sent: they come with its first token

    def report(request: Request, token: int | None, more: object) -> bytes:
        extras: RequestExtras = extras_of(request)
        prompt = None
        if extras.prompt_logprobs and token is not None and request not in told:
            told.add(request)
            prompt = extras.prompt_logprobs
        logprobs: Any = more
        return encode(Report(logprobs, prompt, extras.accepted_drafts, extras.rejected_drafts, extras.embedding))

    return LoopHooks(report=report)
