"""Decoder: the transformer of Llama, Mistral, Qwen2 and Qwen3, over packed tokens and paged keys and values.

There is one path for prefill and decode. Tokens are packed in one row; their keys and values are stored in the slots
they are given, and each token attends to the tokens of its own sequence in the pages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.backend import Backend, Processes
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.linear import Linear, Table
from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights, Weights
from phase2_prefill_decode.rope import tables


class StepTensors(NamedTuple):
    """The input of the model for one step. There is no padding: T tokens are T rows."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, of each token in its sequence
    slots: Tensor  # [tokens] int64, where its key and value are stored
    metadata: AttentionMetadata
    last: Tensor | None  # [rows] int64, the rows that need logits, see `pack`; None: all of them, in order
    newest_rows: Tensor  # [draws] int64, the rows of the device state that get the drawn tokens
    sampling: SamplingInputs  # the parameters of the draws, which are from the first of these rows
    rows: Tensor | None = None  # [sequences] int32, the row of each in the device state
    by_layer: Sequence["StepTensors"] = ()  # for each layer, if their page tables differ


class WholeStep(Protocol):
    """All layers of a model and its lm_head as one operation, for the steps that it accepts."""

    def takes(self, step: StepTensors, /) -> bool: ...

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, pool: Sequence[KVLayer], /
    ) -> Tensor: ...


class RMSNorm:
    """Adds the residual and norms the sum. Returns both: the sum is the next residual."""

    def __init__(self, weight: Tensor, eps: float, backend: Backend) -> None:
        self.weight = weight
        self.eps = eps
        self._add_norm = backend.add_norm

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._add_norm(x, residual, self.weight, self.eps)


class Attention:
    """Stores the keys and values of its tokens, then attends to everything stored for their sequences."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, backend: Backend) -> None:
        self.qkv_proj = backend.linear(weights["qkv_proj"], weights.get("qkv_proj_bias"))
        self.o_proj = backend.linear(weights["o_proj"], weights.get("o_proj_bias"))
        self.qk_norm = (weights["q_norm"], weights["k_norm"]) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.window, self.sinks = layer.window, weights.get("sinks")
        self.rotate_store = backend.rotate_store
        self.attend = backend.attend

    # region exercise 2.6
    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, kv: KVLayer, rows: Tensor | None
    ) -> Tensor:
        """Store and attend with every row of x. Return the results of `rows` only, or of all rows if it is None."""
        qkv = self.qkv_proj(x)
        q = self.rotate_store(qkv, *rope, step.positions, step.slots, kv, self.qk_norm, self.eps)
        attended = self.attend(q, kv, step.metadata, self.scale, self.window, self.sinks).flatten(1)
        return self.o_proj(attended if rows is None else attended[rows])

    # endregion


class MLP:
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: LayerWeights, backend: Backend) -> None:
        self.gate_up_proj = backend.linear(weights["gate_up_proj"], weights.get("gate_up_proj_bias"))
        self.down_proj = backend.linear(weights["down_proj"], weights.get("down_proj_bias"))
        self._swiglu = backend.swiglu

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self._swiglu(self.gate_up_proj(x)))


class DecoderLayer:
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, weights: LayerWeights, backend: Backend) -> None:
        self.input_layernorm = RMSNorm(weights["input_layernorm"], config.rms_norm_eps, backend)
        self.self_attn = Attention(config, layer, weights, backend)
        self.post_attention_layernorm = RMSNorm(weights["post_attention_layernorm"], config.rms_norm_eps, backend)
        self.mlp = MLP(weights, backend)

    @property
    def linears(self) -> list[Linear]:
        """Its products, in the order in which they are computed."""
        return [self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj]

    # region exercise 2.6
    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        step: StepTensors,
        kv: KVLayer,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP and the residual, of `rows` only, or of all rows if it is None."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rope, step, kv, rows)
        residual = residual if rows is None else residual[rows]
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    # endregion


LAYERS: dict[type[LayerConfig], Callable[..., DecoderLayer]] = {LayerConfig: DecoderLayer}  # modules of descriptions


class Decoder:
    """A model on one device, in one dtype. A call computes one step; all state is in the pages."""

    processes: Processes | None = None  # others that compute a part of each step

    def __init__(self, config: ModelConfig, weights: Weights, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.device = weights.norm.device
        self.dtype = weights.norm.dtype
        self.lm_head = backend.linear(weights.lm_head, None)
        table = self.lm_head if weights.lm_head is weights.embed_tokens else weights.embed_tokens
        assert isinstance(table, Tensor | Table)
        self.embed_tokens: Tensor | Table = table
        self.layers = [
            LAYERS[type(layer)](config, layer, tensors, backend)
            for layer, tensors in zip(config.layers, weights.layers, strict=True)
        ]
        self.norm = RMSNorm(weights.norm, config.rms_norm_eps, backend)
        self._positions = -1
        self._rope = self.rope(0)
        self.whole_step = backend.whole_step(self) if len({layer.rope for layer in config.layers}) == 1 else None

    def rope(self, positions: int) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of each layer, for at least the first `positions` positions. The tables grow with the longest
        sequence served, because a config.json may allow any length."""
        if positions > self._positions:
            c = self.config
            self._positions = max(positions, min(2 * self._positions, c.max_position_embeddings))
            ropes = [layer.rope or c.rope_parameters for layer in c.layers]
            made = {rope: tables(rope, c.head_dim, self._positions, self.device) for rope in dict.fromkeys(ropes)}
            self._rope = [made[rope] for rope in ropes]
        return self._rope

    def __call__(self, step: StepTensors, pool: Sequence[KVLayer], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute one step: store the keys and values of its tokens. Returns the logits of the draws, in `out` if that
        is given, and the final hidden states, of which those after the draws may be read."""
        draws = step.newest_rows.shape[0]  # `len` of a tensor takes four times as long
        at_once = not step.by_layer and (step.last is None or step.last.shape[0] == draws)
        if self.whole_step is not None and out is None and at_once and self.whole_step.takes(step):
            x, rope = self.inputs(step)
            return self.whole_step(x, rope[0], step, pool), x
        hidden = self.hidden(step, pool)
        return self.lm_head(hidden[:draws], out), hidden

    # region exercise 2.6
    @torch.inference_mode()
    def hidden(self, step: StepTensors, pool: Sequence[KVLayer]) -> Tensor:
        """Compute a step up to `lm_head`: the final hidden states [rows, hidden_size]."""
        (x, rope), residual = self.inputs(step), None
        for layer, angles, kv, own in zip(self.layers, rope, pool, step.by_layer or [step] * len(rope), strict=False):
            rows = step.last if layer is self.layers[-1] else None  # other rows end with the last attention
            x, residual = layer(x, residual, angles, own, kv, rows)
        x, _ = self.norm(x, residual)
        return x

    # endregion

    def inputs(self, step: StepTensors) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The embeddings of a step's tokens, and each layer's cos and sin up to its last position."""
        table = self.embed_tokens
        x = embedding(step.tokens, table) if isinstance(table, Tensor) else table.rows(step.tokens, self.dtype)
        return x, self.rope(step.metadata.max_seqlen_k)
