"""The operations between the matrix products: the interfaces and the references.

Each is one pass over memory instead of three to ten. Its result for a token does not depend on other tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from phase1_kv_pool.kernels.store import store
from phase1_kv_pool.layer import KVLayer

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
RotateStore = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, KVLayer, tuple[Tensor, Tensor] | None, float], Tensor]
Swiglu = Callable[[Tensor], Tensor]


# region exercise 2.4
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum: the next residual. x, residual: [tokens, width]."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of a head by its angle. x: [tokens, heads, head_dim]; cos, sin: [tokens, half]."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


# endregion


def rotate_store_reference(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * head_dim]; the fused projection q, k, v
    cos: Tensor,  # [positions, head_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [tokens] int64
    slots: Tensor,  # [tokens] int64; -1: padding, store nothing
    kv: KVLayer,
    norms: tuple[Tensor, Tensor] | None,  # weights of the q norm and of the k norm, for models that have them
    eps: float,
) -> Tensor:
    """Norm q and k, apply the rotary embedding, store K and V. Returns q: [tokens, heads, head_dim]."""
    _, kv_heads, _, head_dim = kv.keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    rows = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = cos[positions], sin[positions]
    store(kv, slots, rotate(k, cos, sin), v)
    return rotate(q, cos, sin)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [tokens, 2 * inner], the fused projection gate, up."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
