"""The angles of a model's rotation, for every position: what `Rope` says, in tensors."""

import math

import torch
from torch import Tensor

from phase2_prefill_decode.rope import Rope


# region tables
def tables(rope: Rope, head_dim: int, positions: int, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, [positions, head_dim / 2] float32. Computed on the CPU: the same on every device."""
    angles = torch.arange(positions).float()[:, None] * frequencies(rope, head_dim)
    return (angles.cos() * rope.scaling).to(device), (angles.sin() * rope.scaling).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle that each pair turns by from one position to the next: [head_dim / 2] float32."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    turning = 1 / powers
    if rope.kind == "default":
        return turning
    if rope.kind == "linear":
        return turning / rope.factor
    # A pair turns as it did where `kept` is 1, by the factor slower where it is 0, and at a mean speed in between.
    kept = _kept_by_llama3(rope, turning) if rope.kind == "llama3" else _kept_by_yarn(rope, head_dim)
    return (1 - kept) * (1 / (rope.factor * powers)) + kept * turning


# endregion


def _kept_by_llama3(rope: Rope, turning: Tensor) -> Tensor:
    """By the turns that a pair makes over the original length."""
    turns = rope.original_length / (2 * math.pi / turning)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _kept_by_yarn(rope: Rope, head_dim: int) -> Tensor:
    """By its number: a straight line from the pair that makes `beta_fast` turns to the one that makes `beta_slow`."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a line
    return 1 - ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
