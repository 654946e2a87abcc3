"""NanoServingEngine: all seven phases behind one object. Prompts in, answers out; or step by step, by hand."""

import itertools
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.engine import Params
from phase2_prefill_decode.generation import Completion, Delta, Prompt, make_request
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.weights import Weights, weights_from
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase5_continuous.core import Step
from phase5_continuous.engine import ContinuousEngine
from phase6_integration import gauges
from phase6_integration.assemble import Assembled, assemble
from phase6_integration.options import EngineOptions

Prompts = Prompt | Sequence[Prompt]


class NanoServingEngine:
    """An engine in this process. `generate` and `stream` are for most; `add_request`, `step` and `abort` are for those
    who drive it themselves. It serves one thread; AsyncEngine is for everyone at once."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | Mapping[str, Tensor],
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        """Of a model in memory; `weights` may be a checkpoint's tensors by name. `options` are EngineOptions'."""
        whole = weights if isinstance(weights, Weights) else weights_from(weights, config)
        decoder = Decoder(config, whole, attend=ATTEND.on(whole.embedding.device))
        self._open(EngineOptions(**options), Model(config, decoder, tokenizer))

    @classmethod
    def from_pretrained(cls, model: str | Path = BUNDLED, **options: Any) -> "NanoServingEngine":
        """Of a directory in Hugging Face layout, or of a repository on the hub; the bundled model if none is named."""
        engine = cls.__new__(cls)
        engine._open(EngineOptions(model=str(model), **options))
        return engine

    def _open(self, options: EngineOptions, model: Model | None = None) -> None:
        self._parts: Assembled | None = assemble(options, model)
        self._texts = ContinuousEngine(self._parts.model, self._parts.core)
        self._names = (f"added-{number}" for number in itertools.count(1))

    @property
    def parts(self) -> Assembled:
        """What it is made of: the model, the scheduler, the loop."""
        if self._parts is None:
            raise RuntimeError("this engine was closed")
        return self._parts

    # Prompts in, answers out.

    def generate(self, prompts: Prompts, params: Params = None, *, progress: bool | None = None) -> list[Completion]:
        """The answers, in the order of the prompts. A prompt is a text or a list of token ids; one params serves all,
        or there is one for each. `progress` is a bar; None: on a terminal."""
        show = sys.stderr.isatty() if progress is None else progress
        return self._open_texts.generate(_several(prompts), params, progress=show)

    def stream(self, prompts: Prompts, params: Params = None) -> Generator[Delta]:
        """The answers piece by piece, as steps yield them. Closing the generator aborts what still runs."""
        return self._open_texts.stream(_several(prompts), params)

    # By hand.

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        """Let a request wait for its turn. `step` moves it on, together with all others."""
        core, name = self.parts.core, next(self._names)
        made = make_request(prompt, params or SamplingParams(), self.parts.model, core.clock(), name)
        request = Request(name, made.prompt_tokens, made.params, priority, made.arrival, cache_salt)
        core.submit(request)
        return request

    @property
    def has_work(self) -> bool:
        return self.parts.core.has_work

    def step(self) -> Step | None:
        """One step: who was in it, what it cost, what came of it. None if there was nothing to do."""
        return self.parts.core.step()

    def abort(self, request: Request) -> bool:
        """End a request, wherever it is. False if it had ended before."""
        return self.parts.core.abort(request)

    def get_stats(self) -> dict[str, Any]:
        """What it has done since it was made, and where it stands."""
        parts = self.parts
        return parts.core.stats.report(gauges.read(parts.scheduler))

    def close(self) -> None:
        """Let go of the model and of all memory; what still runs is aborted. May be called again."""
        if self._parts is not None:
            for sequence in list(self._parts.scheduler.sequences):
                self._parts.core.abort(sequence.request)
            self._parts = None
            del self._texts

    def __enter__(self) -> "NanoServingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open_texts(self) -> ContinuousEngine:
        _ = self.parts
        return self._texts


def _several(prompts: Prompts) -> Sequence[Prompt]:
    """A single text, or a single list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
