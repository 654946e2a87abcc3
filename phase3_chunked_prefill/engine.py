"""The engine of this phase: phase 2's, with steps under a token budget and attention for any mixture of slices.

Its requests are still a fixed set, admitted together. What has changed is how a step is planned: prompts are cut into
chunks, and requests with a computed prompt decode in the same steps.
"""

from pathlib import Path

import torch

from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.loading.model import Model, usable
from phase2_prefill_decode.static import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase3_chunked_prefill.kernels.attention import ATTEND


# region load
def load(
    directory: str | Path = BUNDLED,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    progress: bool = False,
) -> Model:
    """`Model.load`, with the attention of this phase: decodes, chunks and whole prompts in any mixture."""
    place = usable(device)
    return Model.load(directory, device=place, dtype=dtype, attend=ATTEND.on(place), progress=progress)


# endregion


# region chunked
def chunked(
    model: Model,
    budget: TokenBudget | None = None,
    *,
    cache: PagedCache | None = None,
    batch_size: int = 64,
    seed: int | None = None,
) -> Engine[StaticScheduler]:
    """Make phase 2's engine with another plan: no step computes more tokens than the budget has. The model may be one
    of phase 2: its output is the same."""
    cache = cache or PagedCache(512, 16)
    plan = Chunker(budget or TokenBudget(), cache.page_size).plan
    return Engine.of(model, StaticScheduler(cache, model.eos_ids, plan_step=plan, batch_size=batch_size), seed)


# endregion
