"""`python -m phase5_continuous.lab families.checkpoints`: chats with a model that keeps states, found and not found.

The same chats, one request after the other, go through two engines in turn: one without a prefix cache, one whose
prefix cache has checkpoints. The model has the shape of LFM2-350M and random weights. Then more chats are replayed
without a model, for the hit rate by the number of checkpoints; the last row is what pages alone would give.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from phase0_request.batch import Slice
from phase0_request.lab.report import at_least_one, finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.checkpoints import CheckpointedLayout
from phase2_prefill_decode.extras.families.stateful import state_bytes
from phase2_prefill_decode.generation import Completion
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.lab.replay import Chats, Turn, play
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous

SHAPE: dict[str, Any] = {
    "model_type": "lfm2", "vocab_size": 65_536, "num_hidden_layers": 16, "hidden_size": 1024, "block_ff_dim": 6656,
    "intermediate_size": 6656, "num_attention_heads": 16, "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "rope_theta": 1e6, "max_position_embeddings": 128_000,
}  # fmt: skip
PAGES, PAGE_SIZE, CHUNK = 512, 16, 512
INSTRUCTION, QUESTION, ANSWER, TURNS = 192, 32, 32, 5  # tokens, and turns of a chat
SLOTS = 1, 8, 16, 32, 64, 128
PEOPLE, REPLAYED, REPLAYED_PAGES = 32, 1000, 8192


@dataclass(frozen=True, slots=True)
class Served:
    """The chats of one engine."""

    hit_rate: float
    computed: int  # tokens of prompts
    ttft_ms: float  # the median of all requests
    first_ttft_ms: float  # of the first turns
    last_ttft_ms: float  # of the last turns
    tpot_ms: float  # the mean time from one token of an answer to the next


class ReplayedCache(CheckpointedPrefixCache):
    """Takes its slots itself, as the runner of a model does."""

    def attach(self, request: Request) -> int:
        if cached := super().attach(request):
            self.checkpoints.use(self.table(request)[-1])
        return cached

    def grow(self, request: Request, tokens: int) -> None:
        super().grow(request, tokens)
        self.checkpoints.take(Slice(request, request.computed, tokens - request.computed))


def chats(model: Model, people: int) -> dict[str, Served]:
    """Each chat in full before the next begins, all with the same instruction."""
    layout = CheckpointedLayout.of(model.config.kv_layout(PAGE_SIZE), state_bytes(model.config))
    caches = {"off": PagedCache(PAGES), "checkpoints": CheckpointedPrefixCache(layout.slots_for(PAGES), PAGES)}
    budget = TokenBudget(CHUNK, CHUNK)
    engines = {name: continuous(model, budget, cache=cache) for name, cache in caches.items()}
    draw, vocabulary = random.Random(0), range(8, model.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    for engine in engines.values():  # compiles what has to be compiled
        engine.generate([draw.choices(vocabulary, k=INSTRUCTION)], params)
    found = {name: list[list[Completion]]() for name in engines}
    instruction = draw.choices(vocabulary, k=INSTRUCTION)
    for _ in track(range(people), "chats", transient=True):
        said = instruction
        for answers in found.values():
            answers.append([])
        for _ in range(TURNS):
            said = said + draw.choices(vocabulary, k=QUESTION)
            for name, engine in engines.items():
                found[name][-1] += engine.generate([said], params)
            said = said + list(found["checkpoints"][-1][-1].output_tokens)
    return {name: served(answers, caches[name]) for name, answers in found.items()}


def served(found: list[list[Completion]], cache: PagedCache) -> Served:
    times = [[each.request.times for each in turns] for turns in found]
    ttft = [[1e3 * (each.ttft or 0) for each in turns] for turns in times]
    tokens = sum(len(each.request.prompt_tokens) for turns in found for each in turns)
    hits = cache.counts.hit_tokens if isinstance(cache, PrefixCache) else 0
    gaps = [(each.tokens[-1] - each.tokens[0]) / (len(each.tokens) - 1) for turns in times for each in turns]
    return Served(
        hit_rate=hits / tokens,
        computed=tokens - hits,
        ttft_ms=median(each for turns in ttft for each in turns),
        first_ttft_ms=median(turns[0] for turns in ttft),
        last_ttft_ms=median(turns[-1] for turns in ttft),
        tpot_ms=1e3 * mean(gaps),
    )


def replayed(turns: Iterable[Turn], cache: PrefixCache) -> float:
    for _ in play(turns, cache):
        pass
    return cache.counts.hit_rate


def takes(config: ModelConfig) -> dict[str, Any]:
    """The memory of PAGES pages, and of the checkpoints beside them."""
    layout = CheckpointedLayout.of(config.kv_layout(PAGE_SIZE), state_bytes(config))
    slots = layout.slots_for(PAGES)
    return {
        "page_bytes": PAGE_SIZE * layout.bytes_per_token, "state_bytes": layout.state_bytes, "pages": PAGES,
        "pages_mb": PAGES * PAGE_SIZE * layout.bytes_per_token / 1e6, "checkpoints": slots,
        "checkpoints_mb": slots * layout.state_bytes / 1e6,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab families.checkpoints", __doc__)
    p.add_argument("--people", type=at_least_one, default=6, help="chats that are served (%(default)s)")
    options = p.parse_args(arguments)
    console, config = Console(highlight=False), ModelConfig.from_dict(SHAPE, "bfloat16")
    model = Model.random(config, device="cpu")
    model.decoder.backend.compile(model.decoder, None, True)
    ways = chats(model, options.people)
    turns = list(Chats(people=PEOPLE, requests=REPLAYED).turns_in_order())
    caches: dict[str, PrefixCache] = {f"slots_{slots}": ReplayedCache(slots, REPLAYED_PAGES) for slots in SLOTS}
    caches["pages_alone"] = PrefixCache(REPLAYED_PAGES)
    rates = {
        name: {"hit_rate": replayed(turns, cache)}
        for name, cache in track(caches.items(), "replayed", transient=True, console=console)
    }
    figures: dict[str, Any] = {
        "parameters": config.parameters,
        "chats": section(console, f"{options.people} chats of {TURNS} turns, one after the other", ways, digits=2),
        "memory": section(console, "The memory of a cache", {"takes": takes(config)})["takes"],
        "replayed": section(console, f"Hit rates of {REPLAYED} requests of {PEOPLE} people", rates, digits=3),
        "ttft_ratio": ways["off"].ttft_ms / ways["checkpoints"].ttft_ms,
        "last_ttft_ratio": ways["off"].last_ttft_ms / ways["checkpoints"].last_ttft_ms,
    }
    finish(p, options, arguments, figures)
    return 0
