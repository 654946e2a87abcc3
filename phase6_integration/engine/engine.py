"""NanoServingEngine: the whole engine as one object for offline use. Call `generate`, or drive it step by step."""

import itertools
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from phase0_request.core import Step
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.engine import Engine, Params
from phase2_prefill_decode.generation import Completion, Delta, Prompt, make_request
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import Weights
from phase2_prefill_decode.model import Model
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.assemble import Assembled, assemble
from phase6_integration.engine.connect_engine import engine_options, extra_totals, processes_for
from phase6_integration.engine.located import located
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.engine.totals import Totals

Prompts = Prompt | Sequence[Prompt]


class NanoServingEngine:
    """An engine in this process, for one thread. `generate` and `stream` run prompts to completion; `add_request`,
    `step` and `abort` are for callers that drive the loop themselves. AsyncEngine serves concurrent callers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        """Build from a model in memory, with the options of EngineOptions."""
        given = engine_options(**options)
        if processes_for(config, given) > 1:
            raise ValueError("tensor_parallel_size is for a model in files: each process reads its own part")
        decoder = Decoder(config, weights, backend_for(weights.norm.device))
        self._open(given, Model(config, decoder, tokenizer))

    @classmethod
    def from_pretrained(cls, model: str | Path = BUNDLED, **options: Any) -> "NanoServingEngine":
        """Load a directory in Hugging Face layout or a repository of the hub; by default the bundled model."""
        engine = cls.__new__(cls)
        engine._open(located(engine_options(model=str(model), **options))[0])
        return engine

    def _open(self, options: EngineOptions, model: Model | None = None) -> None:
        self._totals = Totals()
        self._parts: Assembled | None = assemble(options, model)
        self._parts.core.observers.append(self._totals)
        self._texts: Engine[Scheduler] | None = Engine(self._parts.model, self._parts.core)
        self._names = (f"added-{number}" for number in itertools.count(1))

    @property
    def parts(self) -> Assembled:
        """The model, the scheduler and the engine loop."""
        if self._parts is None:
            raise RuntimeError("this engine was closed")
        return self._parts

    # Run prompts to completion.

    def generate(self, prompts: Prompts, params: Params = None, *, progress: bool | None = None) -> list[Completion]:
        """Run all prompts and return their completions in order. A prompt is a text or a list of token ids; `params` is
        one for all prompts or one for each. `progress` shows a bar; None means: if stderr is a terminal."""
        show = sys.stderr.isatty() if progress is None else progress
        return self._engine().generate(_as_list(prompts), params, progress=show)

    def stream(self, prompts: Prompts, params: Params = None) -> Generator[Delta]:
        """Yield text as steps produce it. Closing the generator aborts the requests that still run."""
        return self._engine().stream(_as_list(prompts), params)

    # Drive the loop.

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """Queue a request. Each call of `step` advances all queued and running requests."""
        core, model = self.parts.core, self.parts.model
        params = params or SamplingParams()
        request = make_request(prompt, params, model, core.clock(), next(self._names), priority, cache_salt)
        self.parts.sampler.prepare(request)  # refuses unsupported parameters now
        core.submit(request)
        return request

    @property
    def has_work(self) -> bool:
        return self.parts.core.has_work

    def step(self) -> Step | None:
        """Run one step and return its batch, its times and its events. None if there was nothing to run."""
        return self.parts.core.step()

    def abort(self, request: Request) -> bool:
        """Abort a request in any state. False if it had finished before."""
        return self.parts.core.abort(request)

    def get_stats(self) -> dict[str, Any]:
        """Statistics since the engine was created, and its current state."""
        gauges = Gauges.read(self.parts.scheduler)
        return self._totals.report(gauges) | extra_totals(gauges)

    def close(self) -> None:
        """Abort all requests and release the model and all memory. May be called again."""
        if self._parts is not None:
            for sequence in list(self._parts.scheduler.sequences):
                self._parts.core.abort(sequence.request)
            self._parts.resources.close()
            self._parts = self._texts = None

    def __enter__(self) -> "NanoServingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine(self) -> Engine[Scheduler]:
        if self._texts is None:
            raise RuntimeError("this engine was closed")
        return self._texts


def _as_list(prompts: Prompts) -> Sequence[Prompt]:
    """A single text or a single list of token ids becomes a list of one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
