"""The stall: how long eight running decodes wait when a long prompt arrives, with and without a token budget.

python -m phase3_chunked_prefill.lab stall --json FILE     # every chunk size, on this machine
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from phase0_request.core import EngineCore, Step
from phase0_request.lab.metrics import percentile
from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import check_int
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import Model, default_device, sampler_for
from phase2_prefill_decode.scheduler import StaticScheduler
from phase2_prefill_decode.step.runner import ModelRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker

WHOLE = 0  # a chunk size: prompts are never cut
CHUNKS = (WHOLE, 1024, 512, 256, 128, 64)


@dataclass(frozen=True, slots=True)
class Scene:
    """Some requests decode. After some steps a long prompt arrives, and gets one token."""

    decodes: int = 8
    context: int = 32  # tokens of each of their prompts
    answer: int = 160  # tokens of each of their answers; they outlast the long prompt
    arrives: int = 16  # after so many steps
    prompt: int = 4096  # tokens of the long one

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_int(name, value, 1)

    def pages(self, page_size: int) -> int:
        """The pages that the whole scene needs."""
        return self.decodes * -(-(self.context + self.answer) // page_size) + -(-self.prompt // page_size)


class Played(NamedTuple):
    """A run of a scene: its steps from the first in which all decode, and the requests with their times."""

    steps: list[Step]
    decodes: list[Request]
    long: Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a scene at one chunk size. A gap is the time between two tokens of one of the decodes."""

    chunk: int
    calm_gap_ms: float  # median, before the long prompt arrived
    p50_gap_ms: float  # these three from its arrival to its first token
    p99_gap_ms: float
    worst_gap_ms: float
    ttft_ms: float  # of the long prompt
    total_ms: float  # from its arrival until all requests have ended


class Stage:
    """A model with a pool, on which a scene is run at any chunk size."""

    def __init__(self, model: Model, scene: Scene, page_size: int = 16) -> None:
        context = model.config.max_position_embeddings
        for name, tokens in (("prompt", scene.prompt + 1), ("answer", scene.context + scene.answer)):
            if tokens > context:
                raise ValueError(f"{name} makes {tokens} tokens, and the context of the model has {context}")
        decoder = model.decoder
        self.scene = scene
        self.cache = PagedCache(scene.pages(page_size), page_size)
        self._vocabulary = model.config.vocab_size
        pool = KVPool(model.config.kv_layout(page_size), scene.pages(page_size), decoder.device, decoder.dtype)
        sampler = sampler_for(model, 0)
        self.runner = ModelRunner(decoder, pool, self.cache, sampler)

    # region play
    def play(self, chunk: int, prompt: int | None = None) -> Played:
        """Run the scene from the first decode to the end, with its long prompt or with one of another length."""
        scene = self.scene if prompt is None else replace(self.scene, prompt=prompt)
        scheduler = StaticScheduler(self.cache)
        core = EngineCore(scheduler, self.runner)
        decodes = [self._request(f"decode-{n}", scene.context, scene.answer, n) for n in range(scene.decodes)]
        for request in decodes:
            core.submit(request)
        running = core.run()
        next(running)  # their prompts, before the scene begins
        if chunk != WHOLE:
            budget = TokenBudget(chunk, chunk + scene.decodes)  # a chunk, and a token for each decode
            scheduler.plan_step = Chunker(budget, self.cache.page_size).plan
        steps = [*islice(running, scene.arrives)]
        long = self._request("long", scene.prompt, 1, scene.decodes)
        core.submit(long)
        scheduler.admit(core.clock())  # a static batch would not let it in
        return Played([*steps, *running], decodes, long)

    # endregion

    def _request(self, name: str, prompt: int, answer: int, seed: int) -> Request:
        tokens = tuple((seed * 7919 + i * 31) % self._vocabulary for i in range(prompt))
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        return Request(name, tokens, params, arrival=time.perf_counter())


# region judge
def judge(chunk: int, played: Played) -> Outcome:
    """Compute the gaps of the decodes, and the times of the long prompt."""
    arrival, first = played.long.times.arrival, played.long.times.tokens[0]
    ends = [request.times.tokens[-1] for request in played.decodes]
    if min(ends) < first:
        raise ValueError(f"a decode ended before the long prompt, in chunks of {chunk}, had its token; answer more")
    gaps = [gap for request in played.decodes for gap in pairwise(request.times.tokens)]
    calm = [later - earlier for earlier, later in gaps if later <= arrival]
    felt = [later - earlier for earlier, later in gaps if later > arrival and earlier < first]
    return Outcome(
        chunk=chunk,
        calm_gap_ms=percentile(calm, 50) * 1e3,
        p50_gap_ms=percentile(felt, 50) * 1e3,
        p99_gap_ms=percentile(felt, 99) * 1e3,
        worst_gap_ms=max(felt) * 1e3,
        ttft_ms=(first - arrival) * 1e3,
        total_ms=(max(first, *ends) - arrival) * 1e3,
    )


# endregion


def measure(stage: Stage, chunks: Sequence[int], rounds: Iterable[int]) -> list[Outcome]:
    """Run every chunk size once in each round, so that a slow minute of the machine affects all. Take the fastest round
    of each: other load can only slow a run down."""
    outcomes = [[judge(chunk, stage.play(chunk)) for chunk in chunks] for _ in rounds]
    return [min(column, key=lambda outcome: outcome.total_ms) for column in zip(*outcomes, strict=True)]


def compared(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """The figures by chunk size, each compared with the first, the whole prompt."""
    whole = outcomes[0]
    return {
        f"chunk_{o.chunk}" if o.chunk else "whole": {
            **asdict(o),
            "times_shorter": whole.worst_gap_ms / o.worst_gap_ms,
            "later_first_token": o.ttft_ms / whole.ttft_ms - 1,
            "longer": o.total_ms / whole.total_ms - 1,
        }
        for o in outcomes
    }


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase3_chunked_prefill.lab stall", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="17m", help="(%(default)s)")
    p.add_argument("--prompt", type=int, metavar="N", help="tokens of the long one (as many as the model takes)")
    p.add_argument("--runs", type=int, default=2, help="of which the best counts (%(default)s)")
    options = p.parse_args(arguments)
    console, device = Console(highlight=False), default_device()
    longest = SHAPES[options.shape].max_position_embeddings - 1
    try:
        scene = Scene(prompt=longest if options.prompt is None else options.prompt)
        stage = Stage(Model.random(SHAPES[options.shape], device=device), scene)
    except ValueError as error:
        p.error(str(error))
    stage.play(128, prompt=min(256, scene.prompt))  # warm-up
    outcomes = measure(stage, CHUNKS, track(range(options.runs), "rounds", transient=True, console=console))
    title = f"{scene.decodes} requests decode when a prompt of {scene.prompt:,} tokens arrives"
    shown = ("calm_gap_ms", "p50_gap_ms", "p99_gap_ms", "worst_gap_ms", "times_shorter", "ttft_ms", "total_ms")
    rows = section(console, title, compared(outcomes), shown=shown)
    figures = {"shape": options.shape, "scene": asdict(scene), "outcomes": rows}
    finish(p, options, arguments, figures, gpu=device.type == "cuda")
    return 0
