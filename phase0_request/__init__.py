"""Phase 0, the life of a request: what it is, how it waits, how it is batched, and how its text comes back."""

from phase0_request.batch import Batch, Slice, StepOutput, StepTokens
from phase0_request.batcher import Batcher
from phase0_request.detokenizer import Detokenizer
from phase0_request.events import Event, reason_to_finish
from phase0_request.logprobs import TokenLogprobs
from phase0_request.metrics import Summary, percentile, summarize
from phase0_request.mock_model import MockModel, StepCost
from phase0_request.params import SamplingParams
from phase0_request.queue import QueueFullError, RequestQueue
from phase0_request.request import FinishReason, InvalidTransitionError, Request, RequestState
from phase0_request.server import Delta, Server, Stream
from phase0_request.times import RequestTimes
from phase0_request.tokenizer import Tokenizer
from phase0_request.trace import Stage, Trace

__all__ = [
    "Batch",
    "Batcher",
    "Delta",
    "Detokenizer",
    "Event",
    "FinishReason",
    "InvalidTransitionError",
    "MockModel",
    "QueueFullError",
    "Request",
    "RequestQueue",
    "RequestState",
    "RequestTimes",
    "SamplingParams",
    "Server",
    "Slice",
    "Stage",
    "StepCost",
    "StepOutput",
    "StepTokens",
    "Stream",
    "Summary",
    "TokenLogprobs",
    "Tokenizer",
    "Trace",
    "percentile",
    "reason_to_finish",
    "summarize",
]
