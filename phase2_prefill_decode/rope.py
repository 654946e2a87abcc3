"""Rotary position embedding (RoPE): the tables of cos and sin that rotate each pair of a head by its position.

Each pair rotates at its own frequency, the first one fastest. To extend a trained context, frequencies are lowered so
that no angle exceeds those seen in training. The types of RopeParameters differ in the pairs that are slowed:

    default   none
    linear    all
    llama3    pairs with few turns over the trained context; those between few and many, in part
    yarn      the same with other bounds, and queries and keys are scaled up a little, which sharpens attention
    longrope  each by a factor of its own
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from phase2_prefill_decode.loading.config import RopeParameters


def tables(
    rope: RopeParameters, head_dim: int, positions: int, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, [positions, head_dim / 2] float32. Computed on the CPU: the same on every device."""
    # region exercise 2.3
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)
    # endregion
    scaling, still = attention_scaling(rope), (0, head_dim // 2 - angles.shape[1])  # pairs that are not rotated
    return pad(angles.cos() * scaling, still, value=1.0).to(device), pad(angles.sin() * scaling, still).to(device)


def frequencies(rope: RopeParameters, head_dim: int) -> Tensor:
    """The angle between neighbouring positions of each pair that is rotated, float32."""
    head_dim = int(head_dim * rope.partial_rotary_factor)
    # region exercise 2.3
    powers = rope.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    # endregion
    unscaled = 1 / powers
    if rope.rope_type == "default":
        return unscaled
    if rope.rope_type == "linear":
        return unscaled / rope.factor
    if rope.rope_type == "longrope":
        return 1 / (torch.tensor(rope.factors) * powers)
    # A pair keeps its frequency where `kept` is 1, is slowed by the factor where it is 0, and is interpolated between.
    kept = _kept_by_llama3(rope, unscaled) if rope.rope_type == "llama3" else _kept_by_yarn(rope, head_dim)
    return (1 - kept) * (1 / (rope.factor * powers)) + kept * unscaled


def attention_scaling(rope: RopeParameters) -> float:
    """The factor that scales queries and keys, each. It is 1 except for yarn and longrope."""
    if rope.attention_factor is not None or rope.rope_type != "yarn":
        return rope.attention_factor or 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor)


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The formula of the YaRN paper, found by experiment."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _kept_by_llama3(rope: RopeParameters, unscaled: Tensor) -> Tensor:
    """The share kept, from the turns of a pair over the original context."""
    turns = rope.original_max_position_embeddings / (2 * math.pi / unscaled)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _kept_by_yarn(rope: RopeParameters, head_dim: int) -> Tensor:
    """The share kept, from the pair's index: a line from the pair with `beta_fast` turns down to `beta_slow` turns."""

    def pair(turns: float) -> float:
        original = rope.original_max_position_embeddings
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a line
    return 1 - ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
