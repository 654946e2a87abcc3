"""Measures what the prefix cache saves: hit rates, prefill tokens not computed, and TTFT.

python -m phase4_radix.lab study --json FILE     # measured on this machine; the hit rates are the same on any
"""

import random
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.generation import Completion
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import Model, default_device
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.engine import chunked
from phase4_radix.engine import cached
from phase4_radix.lab.replay import chats, pressure
from phase4_radix.prefix_cache import Counts, PrefixCache

EXAMPLE = ((1, 2, 3, 4, 5), (1, 2, 3, 6, 7), (10, 20, 30))  # the first two share a prefix
PROMPT = 544  # tokens
COMMON = 512  # of these, the prefix that all requests share
REQUESTS = 16
COMMONS = (0, 64, 128, 192, 256, 320, 384, 448, 512)
PAGE_SIZES = (1, 4, 16)
PEOPLE = (8, 16, 64)


@dataclass(frozen=True, slots=True)
class Loop:
    """A few multi-turn conversations."""

    page_size: int
    turns: int
    queries: int
    prompt_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Served:
    """The totals of serving a set of requests."""

    prefill_tokens: int  # computed
    duplicates: int  # pages computed more than once, and freed
    hit_rate: float
    ttft_ms: float  # the mean of all requests, each from its own arrival
    later_ttft_ms: float  # of all but the first


@dataclass(frozen=True, slots=True)
class Shared:
    """Requests of PROMPT tokens that share the first `common`, one after the other."""

    common: int
    hit_rate: float  # of those after the first
    ttft_ms: float  # the median of them
    plain_ttft_ms: float  # with the cache off


def model_of(shape: str) -> Model:
    """A model of one of SHAPES, with random weights."""
    device = default_device()
    model = Model.random(SHAPES[shape], device=device)
    model.decoder.backend.compile(model.decoder, None, True)
    return model


def loop(model: Model, page_size: int = 16, turns: int = 8) -> Loop:
    """EXAMPLE as multi-turn chats: every turn appends the same prompt to the conversation so far."""
    engine = cached(model, num_pages=2048 // page_size, page_size=page_size)
    params = [SamplingParams(max_tokens=10, temperature=0.7, seed=n, ignore_eos=True) for n in range(len(EXAMPLE))]
    said: list[list[int]] = [[] for _ in EXAMPLE]
    for _ in range(turns):
        prompts = [[*before, *again] for before, again in zip(said, EXAMPLE, strict=True)]
        answers = engine.generate(prompts, params)
        said = [[*prompt, *answer.output_tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    counts = _counts(engine)
    return Loop(page_size, turns, counts.queries, counts.query_tokens, counts.hit_rate)


def prompts_with(common: int, count: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Prompts of PROMPT tokens with a common prefix and suffixes of their own."""
    rng = random.Random(seed)
    tokens = range(8, vocabulary)
    beginning = rng.choices(tokens, k=common)
    return [beginning + rng.choices(tokens, k=PROMPT - common) for _ in range(count)]


def serve(model: Model, *, prefix_cache: bool, together: bool = False, warm: bool = False, answer: int = 8) -> Served:
    """Serve REQUESTS that share COMMON tokens, one after the other or `together` in one batch. With `warm`, an earlier
    request has put the prefix into the cache."""
    engine = cached(model, num_pages=REQUESTS * 40) if prefix_cache else chunked(model, cache=PagedCache(REQUESTS * 40))
    first, *prompts = prompts_with(COMMON, REQUESTS + 1, model.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    if warm:
        engine.generate([first], params)
    before = _counts(engine)
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    ttft = [_ttft_ms(done) for call in calls for done in engine.generate(call, params)]
    counts, tokens = _counts(engine), sum(map(len, prompts))
    found = counts.hit_tokens - before.hit_tokens
    duplicates = counts.duplicates - before.duplicates
    return Served(tokens - found, duplicates, found / tokens, mean(ttft), mean(ttft[1:]))


def shared(model: Model, common: int, requests: int = 7) -> Shared:
    """The same prompts with the cache and without, alternating, so that both run under the same conditions."""
    engines = [cached(model), chunked(model)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first, *prompts = prompts_with(common, requests + 1, model.config.vocab_size, seed=common)
    for engine in engines:
        engine.generate([first], params)
    before, times = _counts(engines[0]), []
    for prompt in prompts:
        times.append([_ttft_ms(engine.generate([prompt], params)[0]) for engine in engines])
    on, off = (median(column) for column in zip(*times, strict=True))
    counts = _counts(engines[0])
    found = (counts.hit_tokens - before.hit_tokens) / (counts.query_tokens - before.query_tokens)
    return Shared(common, found, on, off)


WAYS: dict[str, dict[str, bool]] = {
    "off": {"prefix_cache": False},
    "on": {"prefix_cache": True},
    "off_together": {"prefix_cache": False, "together": True},
    "on_together": {"prefix_cache": True, "together": True},
    "on_together_warm": {"prefix_cache": True, "together": True, "warm": True},
}


def served(model: Model, runs: int = 3) -> dict[str, Served]:
    """Serve REQUESTS in each of WAYS, alternating; the fastest run of each way counts."""
    serve(model, prefix_cache=True, together=True)  # warm-up
    rounds = [{name: serve(model, **way) for name, way in WAYS.items()} for _ in range(runs)]
    return {name: min((each[name] for each in rounds), key=lambda run: run.ttft_ms) for name in WAYS}


def gains(ways: dict[str, Served]) -> dict[str, float]:
    """What the cache saves for requests that arrive one after the other."""
    off, on = ways["off"], ways["on"]
    return {
        "prefill_saved": 1 - on.prefill_tokens / off.prefill_tokens,
        "ttft_ratio": off.ttft_ms / on.ttft_ms,
        "later_ttft_ratio": off.later_ttft_ms / on.later_ttft_ms,
    }


def _ttft_ms(done: Completion) -> float:
    seconds = done.request.times.ttft
    if seconds is None:
        raise RuntimeError(f"{done.request.id} ended without a token: {done.request.error}")
    return 1e3 * seconds


def _counts(engine: Engine[StaticScheduler]) -> Counts:
    """A copy of the counters; all zero for a cache without prefixes."""
    cache = engine.core.scheduler.cache
    if not isinstance(cache, PrefixCache):
        return Counts()
    return Counts(**asdict(cache.counts))


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase4_radix.lab study", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="17m", help="(%(default)s)")
    p.add_argument("--runs", type=int, default=3, help="the fastest of so many counts (%(default)s)")
    options = p.parse_args(arguments)
    console, model, small = Console(highlight=False), model_of(options.shape), Model.load()

    ways = served(model, options.runs)
    gain = gains(ways)
    talks = {f"{people}_people": chats(people) for people in track(PEOPLE, "chats", transient=True, console=console)}
    groups = {"in_turn": pressure(in_turn=True), "at_random": pressure(in_turn=False)}
    alike = [shared(model, common) for common in track(COMMONS, "TTFT", transient=True, console=console)]
    title = f"{REQUESTS} requests with {COMMON} of {PROMPT} tokens in common"
    loops = {f"page_{size}": loop(small, size) for size in PAGE_SIZES}
    figures: dict[str, Any] = {
        "loop": section(console, "The example", loops, digits=3),
        "served": section(console, title, ways, digits=2) | gain,
        "common": section(console, "TTFT", {f"tokens_{row.common}": row for row in alike}, digits=2),
        **{
            what: {
                name: section(console, f"{what}, {name}", {f"pages_{row.pages}": row for row in rows}, digits=3)
                for name, rows in columns.items()
            }
            for what, columns in (("chats", talks), ("pressure", groups))
        },
    }
    console.print(f"{gain['prefill_saved']:.1%} less prefill, first tokens {gain['ttft_ratio']:.1f} times as early")
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 0
