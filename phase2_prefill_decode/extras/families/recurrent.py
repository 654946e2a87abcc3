"""The modules of layers with a state. They compute all sequences of a step at once, whatever the lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import MLP, DecoderLayer, RMSNorm, StepTensors
from phase2_prefill_decode.extras.families.stateful import ShortConvLayer, StatefulLayer
from phase2_prefill_decode.extras.families.states import LayerState, rows_of
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights


class StatefulDecoderLayer(DecoderLayer):
    """A decoder layer with another module in place of attention."""

    def __init__(self, config: ModelConfig, layer: StatefulLayer, weights: LayerWeights, backend: Backend) -> None:
        mixer: Any = MIXERS[type(layer)](layer, weights, backend)
        self.input_layernorm = RMSNorm(weights["input_layernorm"], config.rms_norm_eps, backend)
        self.self_attn = mixer
        self.post_attention_layernorm = RMSNorm(weights["post_attention_layernorm"], config.rms_norm_eps, backend)
        self.mlp = MLP(weights, backend)
        self._mixer_linears = mixer.linears

    @property
    def linears(self) -> list[Linear]:
        return [*self._mixer_linears, self.mlp.gate_up_proj, self.mlp.down_proj]


class Sequences(NamedTuple):
    """The sequences of a step."""

    starts: Tensor  # [sequences] int64, the first new token of each
    lengths: Tensor  # [sequences] int64, of its new tokens
    fresh: Tensor  # [sequences] bool, whether these are its first tokens
    of_tokens: Tensor  # [tokens] int64, the sequence of each token


def sequences(step: StepTensors) -> Sequences:
    """The sequences of a step, computed for its first layer."""
    metadata, tokens = step.metadata, step.tokens.shape[0]
    if Sequences not in metadata.plans:
        bounds = metadata.cu_seqlens_q.long()
        starts, lengths = bounds[:-1], bounds.diff()
        of_tokens = torch.repeat_interleave(lengths, output_size=tokens)
        metadata.plans[Sequences] = Sequences(starts, lengths, metadata.seq_lens == lengths, of_tokens)
    found: Sequences = metadata.plans[Sequences]
    return found


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


class ShortConv:
    """A convolution over few tokens between two gates, all three projected from the input."""

    def __init__(self, layer: ShortConvLayer, weights: LayerWeights, backend: Backend) -> None:
        self.in_proj = backend.linear(weights["in_proj"], weights.get("in_proj_bias"))
        self.out_proj = backend.linear(weights["out_proj"], weights.get("out_proj_bias"))
        self.weight, self.bias = weights["conv_weight"].view(-1, layer.taps), weights.get("conv_bias")
        self.linears = [self.in_proj, self.out_proj]

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, state: LayerState, rows: Tensor | None
    ) -> Tensor:
        before, after, inner = self.in_proj(x).chunk(3, -1)
        y = after * causal_conv(before * inner, state.tensors[0], self.weight, self.bias, step)
        return self.out_proj(y if rows is None else y[rows])


MIXERS: dict[type[StatefulLayer], Callable[..., Any]] = {ShortConvLayer: ShortConv}  # by their descriptions
