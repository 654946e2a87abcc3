"""Tiled attention in plain torch, as the kernels compute it: keys tile by tile, sequences in splits that are joined.

`reference` defines attention; this shows how a kernel computes it, with the kernels' variable names. No engine uses it:
read it beside the kernels and try it at a prompt. Tests hold it to the same results.
"""

import torch
from torch import Tensor

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.kernels.attention import AttentionMetadata

LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E)
LOWEST = -1e30  # initial m_i: finite, because -inf - -inf is NaN


# region accumulate
def accumulate(scores: Tensor, value: Tensor, m_i: Tensor, l_i: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the online softmax. scores: [rows, keys]; value: [keys, head_dim]. The running state: m_i [rows], the
    maximum of the scores; l_i [rows], the sum of the weights; acc [rows, head_dim], the sum of the weighted values."""
    m_new = torch.maximum(m_i, scores.max(1).values)
    alpha = torch.exp2(m_i - m_new)  # rescales what was summed relative to the lower maximum
    p = torch.exp2(scores - m_new[:, None])  # 0 where the score is -inf
    return m_new, l_i * alpha + p.sum(1), acc * alpha[:, None] + p @ value


# endregion


# region join
def join(parts: Tensor, lse: Tensor) -> Tensor:
    """Join the results of splits: their mean, weighted by each split's sum of weights, of which `lse` is the logarithm.
    parts: [splits, rows, head_dim]; lse: [splits, rows]."""
    p = torch.exp2(lse - lse.max(0).values)[..., None]
    return (p * parts).sum(0) / p.sum(0)


# endregion


# region tiled
def tiled(
    query: Tensor,
    kv: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    chunk: int = 256,
    tile: int = 64,
) -> Tensor:
    """Compute what `reference` does. On a GPU the two outer loops and the splits are programs that run in parallel."""
    result = torch.empty_like(query)
    _, kv_heads, page_size, _ = kv.keys.shape
    group = query.shape[1] // kv_heads
    starts, lengths = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        first, new = starts[sequence], starts[sequence + 1] - starts[sequence]
        mine = query[first : first + new].float() * (scale * LOG2_E)
        token = torch.arange(length, device=query.device)
        page = metadata.page_table[sequence, token // page_size]
        position = token[length - new :].repeat_interleave(group)
        for kv_head in range(kv_heads if new else 0):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q = mine[:, heads].flatten(0, 1)  # [new * group, head_dim]: a key loaded for one row serves all
            results: list[tuple[Tensor, Tensor]] = []
            for split in torch.split(token, chunk):
                m_i, l_i, acc = q.new_full(q.shape[:1], LOWEST), q.new_zeros(q.shape[:1]), torch.zeros_like(q)
                if sinks is not None and not results:  # the first split starts at the sink
                    m_i, l_i = sinks[heads].float().repeat(new) * LOG2_E, l_i + 1
                for at in torch.split(split, tile):
                    key, value = (side.float() for side in kv.read((page[at], kv_head, at % page_size)))
                    seen = at <= position[:, None]
                    if window is not None:
                        seen &= at > position[:, None] - window
                    scores = (q @ key.T).masked_fill(~seen, -torch.inf)
                    m_i, l_i, acc = accumulate(scores, value, m_i, l_i, acc)
                results.append((acc / l_i.clamp_min(1e-30)[:, None], m_i + l_i.log2()))
            parts, lse = map(torch.stack, zip(*results, strict=True))
            result[first : first + new, heads] = join(parts, lse).view(new, group, -1)
    return result


# endregion
