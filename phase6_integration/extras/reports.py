"""What an engine's process reports of a request beside tokens: logprobs, the embedding, and how its drafts did."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from phase0_request.core import EngineCore
from phase0_request.request import Request
from phase2_prefill_decode.extras.outcome import RequestExtras, extras_of
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.loop_hooks import LoopHooks, Send


def reports(_: EngineCore[Scheduler, Any], __: Send) -> LoopHooks:
    told: WeakSet[Request] = WeakSet()  # whose logprobs of the prompt are sent: they come with its first token

    def report(request: Request, token: int | None, more: object) -> Mapping[str, Any]:
        extras: RequestExtras = extras_of(request)
        said = {
            "logprobs": more,
            "accepted": extras.accepted_drafts,
            "rejected": extras.rejected_drafts,
            "embedding": extras.embedding,
        }
        if extras.prompt_logprobs and token is not None and request not in told:
            told.add(request)
            said["prompt_logprobs"] = extras.prompt_logprobs
        return said

    return LoopHooks(report=report)
