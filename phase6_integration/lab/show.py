"""Show: the options of the demo. It loads no torch, so that `--help` and errors come at once."""

from dataclasses import dataclass

from phase0_request.params import SamplingParams
from phase6_integration.engine.options import at_least, check_fields, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """The load and the engine of the demo. The engine is small, so that requests have to wait and share."""

    requests: int = option(16, "that arrive, all at once", check=at_least(1), flags=("-n", "--requests"))
    max_tokens: int = option(48, "of an answer")
    temperature: float = option(0.0, "0: always the most likely token", "T")
    max_running: int = option(6, "requests in a step")
    budget: int = option(64, "tokens of a step")
    chunk: int = option(48, "prompt tokens of one request in a step")
    pages: int = option(64, "of the KV cache")
    page_size: int = option(16, "tokens in a page")
    seed: int = option(0, "of questions and answers")

    def __post_init__(self) -> None:
        check_fields(self)
        self.params  # noqa: B018  raises if they are invalid

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
