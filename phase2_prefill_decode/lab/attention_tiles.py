"""Attention the way the kernels do it, in plain torch: keys a tile at a time, sequences in splits that are joined.

`reference` says what attention is; this says how a kernel gets there, by the names that the kernels use. Nothing serves
with it. It is there to be read beside them and to be tried at a prompt, and tests hold it to the same answers.
"""

import torch
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged

LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E)
LEAST = -1e30  # below any score, and finite: the difference of two of them is a number


# region accumulate
def accumulate(
    scores: Tensor, value: Tensor, most: Tensor, total: Tensor, result: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the online softmax. scores: [rows, keys]; value: [keys, head_dim]; the rest is what there is so far:
    the highest score [rows], the sum of the weights [rows], the sum of the weighted values [rows, head_dim]."""
    higher = torch.maximum(most, scores.max(1).values)
    shrink = torch.exp2(most - higher)  # what was added so far was relative to a lower maximum
    weight = torch.exp2(scores - higher[:, None])  # 0 where the score is -inf
    return higher, total * shrink + weight.sum(1), result * shrink[:, None] + weight @ value


# endregion


# region join
def join(parts: Tensor, sizes: Tensor) -> Tensor:
    """What the splits found, as one: their mean, each with the sum of its weights, of which `sizes` has the logarithm.
    parts: [splits, rows, head_dim]; sizes: [splits, rows]."""
    weight = torch.exp2(sizes - sizes.max(0).values)[..., None]
    return (weight * parts).sum(0) / weight.sum(0)


# endregion


# region tiled
def tiled(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ragged: Ragged,
    scale: float,
    window: int | None = None,
    *,
    chunk: int = 512,
    tile: int = 64,
) -> Tensor:
    """What `reference` gives. The two outer loops and the splits are the programs of a GPU, which run side by side."""
    result = torch.empty_like(query)
    _, kv_heads, page_size, _ = keys.shape
    group = query.shape[1] // kv_heads
    for sequence, (new, length) in enumerate(ragged.host_sizes()):
        first = int(ragged.starts[sequence])
        mine = query[first : first + new].float() * (scale * LOG2_E)
        token = torch.arange(length, device=query.device)
        page, position = ragged.pages[sequence, token // page_size], token[length - new :].repeat_interleave(group)
        for kv_head in range(kv_heads if new else 0):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            q = mine[:, heads].flatten(0, 1)  # [new * group, head_dim]: what is read for one row serves them all
            found = []
            for split in torch.split(token, chunk):
                most, total, acc = q.new_full(q.shape[:1], LEAST), q.new_zeros(q.shape[:1]), torch.zeros_like(q)
                for at in torch.split(split, tile):
                    key, value = (side[page[at], kv_head, at % page_size].float() for side in (keys, values))
                    seen = at <= position[:, None]
                    if window is not None:
                        seen &= at > position[:, None] - window
                    scores = (q @ key.T).masked_fill(~seen, -torch.inf)
                    most, total, acc = accumulate(scores, value, most, total, acc)
                found.append((acc / total.clamp_min(1e-30)[:, None], most + total.log2()))
            parts, sizes = map(torch.stack, zip(*found, strict=True))
            result[first : first + new, heads] = join(parts, sizes).view(new, group, -1)
    return result


# endregion
