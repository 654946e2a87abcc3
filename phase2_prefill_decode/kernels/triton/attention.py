"""Attention over pages on a GPU: one launch for prompts and chunks, one for sequences with few new tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from phase1_kv_pool.layer import HIGHEST, KVLayer
from phase2_prefill_decode.kernels.attention import AttentionMetadata, check_shapes
from phase2_prefill_decode.kernels.triton.decode import decode
from phase2_prefill_decode.kernels.triton.plan import FEW, plan
from phase2_prefill_decode.kernels.triton.prefill import prefill_kernel, tiling
from phase2_prefill_decode.kernels.triton.tiles import LOG2_E, constants


# region attend
def attend(
    query: Tensor, kv: KVLayer, metadata: AttentionMetadata, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Run each sequence on the kernel that `plan` assigns.

    A step of short sequences needs no plan and no sizes on the host, so it can be captured in a CUDA graph.
    """
    check_shapes(query, kv)
    query, result = query.contiguous(), metadata.out
    if result is None:
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
    if metadata.max_seqlen_q <= FEW:
        decode(query, kv, result, metadata, scale, window, sinks=sinks)
        return result
    heads, (_, kv_heads, page_size, head_dim) = query.shape[1], kv.keys.shape
    group = heads // kv_heads
    tiles = tiling(head_dim, query.element_size(), group, kv.keys.dtype in HIGHEST)
    blocks, short = planned(metadata, group, tiles.rows // group, window)
    if len(blocks) > 0:
        with torch.cuda.device(query.get_device()):
            prefill_kernel[kv_heads, len(blocks)](
                query, *kv, sinks, result, metadata.cu_seqlens_q, metadata.seq_lens, metadata.page_table, blocks,
                metadata.page_table.stride(0), scale * LOG2_E.value,
                **constants(heads, kv_heads, page_size, head_dim, tiles, window), **tiles.options,
            )  # fmt: skip
    if short is not None:
        decode(query, kv, result, short, scale, window, sinks=sinks)
    return result


# endregion


def planned(
    metadata: AttentionMetadata, group: int, block: int, window: int | None
) -> tuple[Tensor, AttentionMetadata | None]:
    """The blocks on the device, and the batch with the maxima of its short sequences, if there are any.

    They are made once a step for each kind of layer, and kept in the metadata. `block` is in new tokens.
    """
    key = group, block, window
    if key not in metadata.plans:
        if not metadata.sizes:
            raise ValueError(f"a step with more than {FEW} new tokens of a sequence needs the sizes on the host")
        step = plan(metadata.sizes, group, block, window)
        blocks, device = torch.from_numpy(step.blocks), metadata.cu_seqlens_q.device
        if device.type == "cuda":
            blocks = blocks.pin_memory().to(device, non_blocking=True)
        short = replace(metadata, max_seqlen_q=step.queries, max_seqlen_k=step.longest) if step.queries else None
        metadata.plans[key] = blocks, short
    blocks, short = metadata.plans[key]
    return blocks, short
