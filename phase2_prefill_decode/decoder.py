"""Decoder: the transformer of four families, as one pass over packed tokens and a pool of pages.

There is one path. It does not know a prefill from a decode: tokens come in a row, their keys and values go to the slots
they are given, and each sees what its sequence has in its pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.kernels.attention import ATTEND, Attend
from phase2_prefill_decode.kernels.pointwise import ADD_NORM, ROTATE_STORE, SWIGLU
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.packed import Packed
from phase2_prefill_decode.rope_tables import tables
from phase2_prefill_decode.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a layer, ready to be multiplied with."""

    input_norm: Tensor
    qkv: Linear
    norms: tuple[Tensor, Tensor] | None  # of q and of k
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """A model on one device, in one dtype. Calling it computes one step; it keeps nothing of it but what is in pages.

    `attend` is the attention to use: by default this phase's own for the device.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, attend: Attend | None = None) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.embedding = weights.embedding
        self.layers = [_layer(w, window) for w, window in zip(weights.layers, config.windows, strict=True)]
        self.norm = weights.norm
        self.head = Linear(weights.head)
        self.cos, self.sin = tables(config.rope, config.head_dim, config.max_length, self.device)
        self.attend = attend or ATTEND.on(self.device)
        self._add_norm = ADD_NORM.on(self.device)
        self._rotate_store = ROTATE_STORE.on(self.device)
        self._swiglu = SWIGLU.on(self.device)

    # region forward
    @torch.inference_mode()
    def __call__(self, packed: Packed, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """One step: stores the keys and values of its tokens, returns logits, [rows that are wanted, vocabulary]."""
        eps, scale = self.config.norm_eps, self.config.head_dim**-0.5
        x, residual = embedding(packed.tokens, self.embedding), None
        for number, layer in enumerate(self.layers):
            x, residual = self._add_norm(x, residual, layer.input_norm, eps)
            pages = keys[number], values[number]
            q = self._rotate_store(
                layer.qkv(x), self.cos, self.sin, packed.positions, packed.slots, *pages, layer.norms, eps
            )
            x = self.attend(q, *pages, packed.metadata, scale, layer.window).flatten(1)
            if packed.last is not None and number == len(self.layers) - 1:
                x, residual = x[packed.last], residual[packed.last]  # from here on no token looks at another
            x, residual = self._add_norm(layer.out(x), residual, layer.post_norm, eps)
            x = layer.down(self._swiglu(layer.gate_up(x)))
        return self.head(self._add_norm(x, residual, self.norm, eps)[0])

    # endregion


def _layer(weights: LayerWeights, window: int | None) -> Layer:
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = weights.q_norm, weights.k_norm
    return Layer(
        input_norm=weights.input_norm,
        qkv=Linear(weights.qkv, weights.qkv_bias),
        norms=norms,
        out=Linear(weights.out, weights.out_bias),
        post_norm=weights.post_norm,
        gate_up=Linear(weights.gate_up, weights.gate_up_bias),
        down=Linear(weights.down, weights.down_bias),
        window=window,
    )
