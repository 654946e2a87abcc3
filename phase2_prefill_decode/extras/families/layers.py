"""The modules of layers that differ from the core's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import Attention, DecoderLayer, RMSNorm, StepTensors
from phase2_prefill_decode.extras.families.experts import linears_of_mlp, mlp_of
from phase2_prefill_decode.extras.families.layer import FamilyLayer
from phase2_prefill_decode.extras.families.recurrent import MixedDecoderLayer
from phase2_prefill_decode.extras.families.stateful import DeltaLayer, GatedLayer, ShortConvLayer
from phase2_prefill_decode.extras.linears import Product, Wrapped
from phase2_prefill_decode.kernels.pointwise import RotateStore, rms_norm
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights


class FamilyDecoderLayer(DecoderLayer):
    """Attention and MLP with norms before them, after them, or both."""

    def __init__(self, config: ModelConfig, layer: FamilyLayer, weights: LayerWeights, backend: Backend) -> None:
        def norm(place: str) -> RMSNorm | None:
            return RMSNorm(weights[place], config.rms_norm_eps, backend) if place in weights else None

        self.before_attention, self.before_mlp = norm("before_attention"), norm("before_mlp")
        self.after_attention, self.after_mlp = norm("after_attention"), norm("after_mlp")
        dtype = next(tensor.dtype for tensor in weights.values() if isinstance(tensor, Tensor))  # that of all rows
        self.first, self.multiplier = torch.tensor(layer.input_multiplier).to(dtype).item(), layer.residual_multiplier
        self.self_attn = (RowNormedAttention if layer.norms_rows else Attention)(config, layer, weights, backend)
        self.self_attn.scale = layer.scale or self.self_attn.scale
        if layer.query_growth is not None:
            self.self_attn.rotate_store = _growing(self.self_attn.rotate_store, *layer.query_growth)
        backend = replace(backend, swiglu=activation(layer, backend))
        self.mlp = mlp_of(layer.experts, weights, backend)

    @property
    def linears(self) -> list[Linear]:
        return [self.self_attn.qkv_proj, self.self_attn.o_proj, *linears_of_mlp(self.mlp)]

    # region exercise 10.2
    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        step: StepTensors,
        kv: KVLayer,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = add(x if self.first == 1 else x * self.first, residual, self.before_attention)
        x = self.output(self.self_attn(x, rope, step, kv, rows), self.after_attention)
        residual = residual if rows is None else residual[rows]
        x, residual = add(x, residual, self.before_mlp)
        return self.output(self.mlp(x), self.after_mlp), residual

    def output(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """What is added to the residual."""
        x = x if norm is None else norm(x, None)[0]
        return x if self.multiplier == 1 else x * self.multiplier

    # endregion


def add(x: Tensor, residual: Tensor | None, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    """The sum, normed if there is a norm, and the sum: the next residual."""
    if norm is not None:
        return norm(x, residual)
    total = x if residual is None else x + residual
    return total, total


class RowNormedAttention(Attention):
    """Attention that norms q and k over all their heads at once."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, backend: Backend) -> None:
        super().__init__(config, layer, weights, backend)
        q_norm, k_norm = weights["q_norm"], weights["k_norm"]
        project, self.qk_norm = self.qkv_proj, None

        def normed(product: Product) -> Product:
            def qkv(rows: Tensor, out: Tensor | None = None) -> Tensor:
                result = product(rows, out)
                for first, weight in ((0, q_norm), (len(q_norm), k_norm)):
                    part = result[:, first : first + len(weight)]
                    part.copy_(rms_norm(part, weight, self.eps))
                return result

            return qkv

        self.qkv_proj = Wrapped(project, normed)


def _growing(rotate_store: RotateStore, beta: float, original: int) -> RotateStore:
    """Scale queries by their position: more the further it is beyond the original context."""

    def scaled(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *further: Any) -> Tensor:
        q = rotate_store(qkv, cos, sin, positions, *further)
        scale = 1 + beta * torch.log1p((positions // original).float())
        return q * scale.to(q.dtype)[:, None, None]

    return scaled


def activation(layer: FamilyLayer, backend: Backend) -> Callable[[Tensor], Tensor]:
    """The gated activation of an MLP."""
    if layer.clamped is not None:
        return partial(_clamped_swiglu, *layer.clamped)
    return backend.swiglu if layer.activation == "silu" else _geglu


def _geglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


def _clamped_swiglu(alpha: float, limit: float, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


MODULES: Mapping[type[LayerConfig], type[DecoderLayer]] = {  # by their descriptions
    FamilyLayer: FamilyDecoderLayer,
    ShortConvLayer: MixedDecoderLayer,
    DeltaLayer: MixedDecoderLayer,
    GatedLayer: MixedDecoderLayer,
}
