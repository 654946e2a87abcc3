"""The runner of a model over a cache, with the pool and the device state of the two. What does not fit is refused."""

from collections.abc import Sequence

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.windows import WindowedCache
from phase1_kv_pool.layout import KVLayout
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.families.stateful import check_stateless, has_states
from phase2_prefill_decode.extras.windows import check_groups, pool_for, state_for
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.step.runner import ModelRunner


def runner_of(
    decoder: Decoder, layout: KVLayout, cache: PagedCache, sampler: Sampler, size: Sequence[int], ahead: bool
) -> ModelRunner:
    """ConfigError if the cache is not one for this model."""
    if isinstance(cache, WindowedCache):
        check_stateless(decoder.config, "a cache with page tables for each group of layers")
        check_groups(cache.groups, decoder.config)
        if decoder.processes is not None:
            raise ConfigError(
                "each rank has one page table for all layers: it cannot use a cache with groups of layers"
            )
    pool, state = pool_for(layout, cache, decoder.device), state_for(cache, decoder.device, *size)
    return _kind(decoder)(decoder, pool, cache, sampler, state, ahead=ahead)


def _kind(decoder: Decoder) -> type[ModelRunner]:
    if has_states(decoder.config):
        from phase2_prefill_decode.extras.families.states import StatefulRunner

        return StatefulRunner
    if decoder.processes is None:
        return ModelRunner
    from phase2_prefill_decode.extras.parallel.leader import Leader

    return Leader
