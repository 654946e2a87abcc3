"""The modules in place of attention: with a state, or with a gate. They compute all sequences of a step at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import Attention, DecoderLayer, RMSNorm, StepTensors
from phase2_prefill_decode.extras.families.delta_rule import Tokens, delta_rule, sequences
from phase2_prefill_decode.extras.families.experts import linears_of_mlp, mlp_of
from phase2_prefill_decode.extras.families.stateful import (
    HEAD_NORM,
    DeltaLayer,
    GatedLayer,
    ShortConvLayer,
)
from phase2_prefill_decode.extras.families.states import Cuts, LayerState, rows_of
from phase2_prefill_decode.kernels.pointwise import rms_norm
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights


class MixedDecoderLayer(DecoderLayer):
    """A decoder layer with another module in place of attention."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, backend: Backend) -> None:
        mixer: Any = MIXERS[type(layer)](config, layer, weights, backend)
        self.input_layernorm = RMSNorm(weights["input_layernorm"], config.rms_norm_eps, backend)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(weights["post_attention_layernorm"], config.rms_norm_eps, backend)
        self.mlp = mlp_of(getattr(layer, "experts", None), weights, backend)
        self._mixer_linears = mixer.linears

    @property
    def linears(self) -> list[Linear]:
        return [*self._mixer_linears, *linears_of_mlp(self.mlp)]


# region exercise 10.4
def causal_conv(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, step: StepTensors) -> Tensor:
    """A causal convolution of each channel over each sequence. x: [tokens, width]; states: [rows, taps - 1, width], the
    inputs before x, which become the last ones of x; weight: [width, taps]. Summed in float32."""
    assert step.rows is not None
    starts, lengths, fresh, of_tokens = sequences(step)
    kept = weight.shape[1] - 1
    # All sequences in one row, each after its state.
    number = torch.arange(len(starts), device=x.device)
    offsets = torch.arange(kept, device=x.device)
    before = (starts + number * kept)[:, None] + offsets  # [sequences, kept]
    places = torch.arange(len(x), device=x.device) + (of_tokens + 1) * kept  # [tokens]
    row = x.new_empty(len(x) + before.numel(), x.shape[1])
    row[before] = rows_of(states, step.rows, fresh)
    row[places] = x
    states.index_copy_(0, step.rows.long(), row[before + lengths[:, None]])
    total = x.new_zeros(x.shape, dtype=torch.float32) if bias is None else bias.float().expand(x.shape)
    for tap in range(kept + 1):
        total = total + row[places - kept + tap].float() * weight[:, tap].float()
    return total.to(x.dtype)


# endregion


def copy_inputs(x: Tensor, state: LayerState, step: StepTensors) -> None:
    """Copy the states of a convolution at the cuts within its sequences: the last inputs before each. They are read
    before the convolution, which updates the states."""
    cuts: Cuts | None = step.metadata.plans.get(Cuts)
    if cuts is None:
        return
    assert step.rows is not None
    starts, _, fresh, _ = sequences(step)
    own, states = cuts.sequences, state.tensors[0]
    kept = states.shape[1]
    places = cuts.lengths[:, None] + torch.arange(kept, device=x.device)  # [cuts, kept], in the state and then in x
    old = rows_of(states, step.rows[own], fresh[own])
    old = old.gather(1, places.clamp(max=kept - 1)[..., None].expand_as(old))
    new = x[(starts[own, None] + places - kept).clamp(min=0)]
    state.checkpoints[0].index_copy_(0, cuts.slots, torch.where((places < kept)[..., None], old, new))


class ShortConv:
    """A convolution over few tokens between two gates, all three projected from the input."""

    def __init__(self, config: ModelConfig, layer: ShortConvLayer, weights: LayerWeights, backend: Backend) -> None:
        self.in_proj = backend.linear(weights["in_proj"], weights.get("in_proj_bias"))
        self.out_proj = backend.linear(weights["out_proj"], weights.get("out_proj_bias"))
        self.weight, self.bias = weights["conv_weight"].view(-1, layer.taps), weights.get("conv_bias")
        self.linears = [self.in_proj, self.out_proj]

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, state: LayerState, rows: Tensor | None
    ) -> Tensor:
        before, after, inner = self.in_proj(x).chunk(3, -1)
        inputs = before * inner
        copy_inputs(inputs, state, step)
        y = after * causal_conv(inputs, state.tensors[0], self.weight, self.bias, step)
        return self.out_proj(y if rows is None else y[rows])


class DeltaNet:
    """Gated DeltaNet. The state of a head is a matrix S from keys to values. A token lets it decay, reads what it has
    for the token's key, and writes the part of the token's value that was not there:

        S = exp(g) * S;    S = S + k * beta * (v - k @ S);    result = q @ S
    """

    def __init__(self, config: ModelConfig, layer: DeltaLayer, weights: LayerWeights, backend: Backend) -> None:
        self.layer, self.eps = layer, config.rms_norm_eps
        self.in_proj, self.out_proj = (
            backend.linear(weights["in_proj"], None),
            backend.linear(weights["out_proj"], None),
        )
        self.conv, self.norm = weights["conv1d"].view(-1, layer.taps), weights[HEAD_NORM]
        self.decay, self.dt_bias = -weights["A_log"].float().exp(), weights["dt_bias"]
        self.linears = [self.in_proj, self.out_proj]

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, state: LayerState, rows: Tensor | None
    ) -> Tensor:
        layer, (keys, values) = self.layer, self.layer.sizes
        heads = layer.value_heads
        mixed, z, b, a = torch.split(self.in_proj(x), [2 * keys + values, values, heads, heads], -1)
        copy_inputs(mixed, state, step)
        mixed = silu(causal_conv(mixed, state.tensors[0], self.conv, None, step)).float()
        q, k, v = torch.split(mixed, [keys, keys, values], -1)
        q, k = (unit(side.view(len(x), -1, layer.key_dim)) for side in (q, k))
        order = torch.arange(heads, device=x.device)  # of the key heads, for each value head
        order = order % layer.key_heads if layer.tiled else order // (heads // layer.key_heads)
        q, k = (side[:, order] for side in (q * layer.key_dim**-0.5, k))
        g = self.decay * softplus(a.float() + self.dt_bias)
        tokens = Tokens(q, k, v.view(len(x), heads, -1), g, b.sigmoid().float())
        y = delta_rule(tokens, state.tensors[1], step, state.checkpoints[1]).to(x.dtype)
        y, z = (y, z) if rows is None else (y[rows], z[rows])
        y = rms_norm(y, self.norm, self.eps) * silu(z.view(*y.shape).float())
        return self.out_proj(y.to(x.dtype).flatten(1))


def unit(x: Tensor) -> Tensor:
    """Heads of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedAttention(Attention):
    """Attention with a gate for each number of its result."""

    def __init__(self, config: ModelConfig, layer: GatedLayer, weights: LayerWeights, backend: Backend) -> None:
        super().__init__(config, layer, weights, backend)
        self.gate_proj = backend.linear(weights["gate_proj"], weights.get("gate_proj_bias"))
        self.linears = [self.qkv_proj, self.o_proj, self.gate_proj]

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, kv: KVLayer, rows: Tensor | None
    ) -> Tensor:
        q = self.rotate_store(self.qkv_proj(x), *rope, step.positions, step.slots, kv, self.qk_norm, self.eps)
        attended = self.attend(q, kv, step.metadata, self.scale, self.window, self.sinks).flatten(1)
        if rows is not None:
            attended, x = attended[rows], x[rows]
        return self.o_proj(attended * self.gate_proj(x).sigmoid())


MIXERS: dict[type[LayerConfig], Callable[..., Any]] = {  # by their descriptions
    DeltaLayer: DeltaNet,
    GatedLayer: GatedAttention,
    ShortConvLayer: ShortConv,
}
