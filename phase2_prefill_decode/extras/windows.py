"""Page tables for each group of layers, on the device: a pool whose tensors the groups share, and a DeviceState that
gives each layer the page table and slots of its group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.extras.checkpoints import CheckpointedLayout
from phase1_kv_pool.extras.layer_groups import GroupedLayout, LayerGroups, within
from phase1_kv_pool.extras.windows import WindowedCache
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder, StepTensors
from phase2_prefill_decode.extras.families.stateful import state_bytes
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.step.device_state import DeviceState
from phase2_prefill_decode.step.packed import PackedStep


def layout_for(
    layout: KVLayout, decoder: Decoder, options: Mapping[str, Any], in_flight: int, context: int
) -> KVLayout:
    """The layout of a pool. Layers with windows free the pages before them, unless what computes the steps has one page
    table for all layers: ranks, pieces of graphs, a draft model beside the target, and on a CPU the whole step."""
    disabled, speculative = options.get("disable_hybrid_kv_cache_manager"), options.get("speculative_config")
    groups = LayerGroups.of(within(decoder.config.windows, context), in_flight)
    pieces, drafts = options.get("enable_piecewise_cuda_graph"), "model" in (speculative or {})
    states = state_bytes(decoder.config)
    if states and options["enable_prefix_caching"]:
        layout = CheckpointedLayout.of(layout, states)
    events = options.get("kv_events_config")  # routers would send requests for pages that have lost their windows
    one_table = decoder.processes is not None or pieces or drafts or states or events
    if groups is None or disabled or (one_table and disabled is None):
        return layout
    if one_table:
        raise ConfigError(
            "disable_hybrid_kv_cache_manager=False gives layers page tables of their own: it goes neither with "
            "tensor_parallel_size, nor with enable_piecewise_cuda_graph, kv_events_config, a draft model, or layers "
            "that keep states"
        )
    if disabled is None and groups.count > 1 and decoder.whole_step is not None:
        return layout
    return GroupedLayout.of(layout, groups)


def check_groups(groups: LayerGroups, config: ModelConfig) -> None:
    """ConfigError if a layer of a model needs pages that these groups do not keep for it."""
    windows = config.windows
    freed = [window for (group, _), window in zip(groups.places, windows, strict=False) if group >= groups.full]
    kept = all(window is not None and window <= groups.window for window in freed)
    if len(groups.places) != len(windows) or not kept:
        raise ConfigError(
            f"the cache is for {len(groups.places)} layers, {len(freed)} of them with windows of up to {groups.window} "
            f"tokens; the layers of this model have windows of {windows}; make its groups by LayerGroups.of"
        )


def pool_for(layout: KVLayout, cache: PagedCache, device: torch.device) -> KVPool:
    """The pool of a cache, for a model with this layout. Of a WindowedCache, layers in the same place of their groups
    have one tensor, and the null page is the last."""
    if not isinstance(cache, WindowedCache):
        return KVPool(layout, cache.usage.total, device)
    pool = KVPool(GroupedLayout.of(layout, cache.groups), cache.null + 1, device)
    pool.layers = [pool.layers[place] for _, place in cache.groups.places]
    return pool


def state_for(cache: PagedCache, device: torch.device, rows: int = 0, pages: int = 0) -> DeviceState:
    if isinstance(cache, WindowedCache):
        return WindowedState(cache.groups, cache.page_size, device, rows, pages)
    return DeviceState(device, rows, pages)


class WindowedState(DeviceState):
    """A DeviceState with the page tables of a WindowedCache: an entry has a page for each group."""

    def __init__(self, groups: LayerGroups, page_size: int, device: torch.device, rows: int, pages: int) -> None:
        super().__init__(device, rows, pages * groups.count)
        self.changes = DeviceState.changes * groups.count
        self.groups = groups
        self.page_size = page_size

    def load(self, step: PackedStep, arrays: Sequence[Tensor]) -> StepTensors:
        tensors = super().load(step, arrays)
        metadata, positions = tensors.metadata, tensors.positions
        entries = metadata.page_table.shape[1] // self.groups.count
        table = metadata.page_table[:, : entries * self.groups.count]
        tables = table.reshape(len(table), entries, -1).permute(2, 0, 1).contiguous()  # [groups, sequences, entries]
        rows = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        sequences = torch.bucketize(rows, metadata.cu_seqlens_q[1:], right=True)
        pages = tables[:, sequences, positions // self.page_size].long()  # [groups, tokens]
        slots = torch.where(tensors.slots < 0, -1, pages * self.page_size + positions % self.page_size)
        steps = [
            tensors._replace(slots=own, metadata=replace(metadata, page_table=table))
            for own, table in zip(slots, tables, strict=True)
        ]
        if len(steps) == 1:
            return steps[0]
        return steps[0]._replace(by_layer=[steps[group] for group, _ in self.groups.places])
