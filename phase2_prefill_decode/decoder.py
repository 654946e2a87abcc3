"""Decoder: the transformer of Llama, Mistral, Qwen2 and Qwen3, over packed tokens and paged keys and values.

There is one path for prefill and decode. Tokens are packed in one row; their keys and values are stored in the slots
they are given, and each token attends to the tokens of its own sequence in the pages.

Where a small model decodes few tokens on a CPU, to call the operators takes longer than what they compute. Such a step
is one kernel, `kernels.cpu.forward`, which does the same.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phase1_kv_pool.layer import KVLayer, torch_dtype
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.memory import free_bytes
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.kernels.attention import ATTEND, Attend, AttentionMetadata
from phase2_prefill_decode.kernels.pointwise import ADD_NORM, ROTATE_STORE, SWIGLU
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.matrix import Stream
from phase2_prefill_decode.loading.weights import LayerWeights, Weights
from phase2_prefill_decode.rope import tables
from phase2_prefill_decode.step.packed import StepTensors

if TYPE_CHECKING:
    from phase2_prefill_decode.extras.cpu.forward import Forward

Record = Callable[[Callable[[], Any]], Callable[[], Any]]  # makes of a step what computes it again


class Table(Protocol):
    """An embedding that is not a plain tensor."""

    def rows(self, tokens: Tensor, dtype: torch.dtype, /) -> Tensor: ...


class RMSNorm:
    """Adds the residual and norms the sum. Returns both: the sum is the next residual."""

    # region exercise 2.5
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._add_norm = ADD_NORM.on(weight.device)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._add_norm(x, residual, self.weight, self.eps)

    # endregion


class Attention:
    """Stores the keys and values of its tokens, and attends to all that their sequences have in pages."""

    # region exercise 2.5
    def __init__(self, config: ModelConfig, weights: LayerWeights, window: int | None, attend: Attend) -> None:
        self.qkv_proj = Linear(weights.qkv_proj, weights.qkv_proj_bias)
        self.o_proj = Linear(weights.o_proj, weights.o_proj_bias)
        self.qk_norm = None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.window = window
        self.attend = attend
        self._rotate_store = ROTATE_STORE.on(weights.input_layernorm.device)

    def store(self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, kv: KVLayer) -> Tensor:
        """Store the keys and values of these rows. Return their queries: [tokens, heads, head_dim]."""
        qkv = self.qkv_proj(x)
        return self._rotate_store(qkv, *rope, step.positions, step.slots, kv, self.qk_norm, self.eps)

    def __call__(self, q: Tensor, kv: KVLayer, metadata: AttentionMetadata) -> Tensor:
        """Attend to what is stored: [tokens, heads, head_dim]."""
        return self.attend(q, kv, metadata, self.scale, self.window)

    # endregion


class MLP:
    """The gated MLP: down(silu(gate(x)) * up(x))."""

    # region exercise 2.5
    def __init__(self, weights: LayerWeights) -> None:
        self.gate_up_proj = Linear(weights.gate_up_proj, weights.gate_up_proj_bias)
        self.down_proj = Linear(weights.down_proj, weights.down_proj_bias)
        self._swiglu = SWIGLU.on(weights.input_layernorm.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self._swiglu(self.gate_up_proj(x)))

    # endregion


class DecoderLayer:
    """Attention and MLP, each after a norm and with a residual."""

    # region exercise 2.5
    def __init__(self, config: ModelConfig, weights: LayerWeights, window: int | None, attend: Attend) -> None:
        self.input_layernorm = RMSNorm(weights.input_layernorm, config.rms_norm_eps)
        self.self_attn = Attention(config, weights, window, attend)
        self.post_attention_layernorm = RMSNorm(weights.post_attention_layernorm, config.rms_norm_eps)
        self.mlp = MLP(weights)

    def before(
        self, x: Tensor, residual: Tensor | None, rope: tuple[Tensor, Tensor], step: StepTensors, kv: KVLayer
    ) -> tuple[Tensor, Tensor]:
        """Up to the attention: store keys and values, and return the queries and the residual."""
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn.store(x, rope, step, kv), residual

    def after(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the attention: what comes out of the MLP, and the residual that is to be added to it."""
        x = self.self_attn.o_proj(attended.flatten(1))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    # endregion


class Decoder:
    """A model on one device, in one dtype. A call computes one step; all state is in the pages.

    `attend` is the attention function; by default this phase's own for the device.
    """

    ranks: Ranks | None = None  # the other processes of a model that is split over several

    def __init__(self, config: ModelConfig, weights: Weights, *, attend: Attend | None = None) -> None:
        self.config = config
        self.device = weights.norm.device
        self.dtype = weights.norm.dtype
        attend = attend or ATTEND.on(self.device)
        self.lm_head = Linear(weights.lm_head)
        tied = self.lm_head.packed if weights.lm_head is weights.embed_tokens else ()
        table = tied[0] if tied else weights.embed_tokens
        assert not isinstance(table, Stream)  # what is not tied is read at once
        self.embed_tokens: Tensor | Table = table
        self.layers = [
            DecoderLayer(config, layer, window, attend)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]
        self.norm = RMSNorm(weights.norm, config.rms_norm_eps)
        self._rope = tables(config.rope_parameters, config.head_dim, 0, self.device)
        self._on_cpu = self.device.type == "cpu"
        self._forward = self._one_call(attend) if self._on_cpu else None

    def on_all_ranks(self, record: Record) -> Record:
        """What records a step on all ranks. There is one here."""
        return record

    def kv_pool(self, layout: KVLayout, pages: int) -> KVPool:
        """The keys and values of an engine."""
        return KVPool(layout, pages, self.device)

    @property
    def free_bytes(self) -> int | None:
        """The memory that is free for its keys and values. None if the system does not report it."""
        return free_bytes(self.device)

    @property
    def linear(self) -> str:
        """How the linear layers compute."""
        return self.layers[0].mlp.down_proj.kernel

    def compile_kernels(self, kv_dtype: str | None = None, *, progress: bool = False) -> None:
        """Compile the kernels of a CPU for this model, with keys and values in `kv_dtype` or its own dtype, or those of
        a GPU for quantized weights, unless the cache has them. Without this each is at its first call, for seconds and
        without a message."""
        for linear in (*chain(*self._linears()), self.lm_head):
            for product in linear.on_gpu:
                product.compile()
        if self._on_cpu:
            from phase2_prefill_decode.extras.cpu.compilation import compile_kernels, kernels_of

            linears = (*chain(*self._linears()), self.lm_head)
            stored = {weight.dtype for linear in linears for weight in linear.packed}
            cached = None if kv_dtype is None else torch_dtype(kv_dtype)
            compile_kernels(kernels_of(self.dtype, self._forward is not None, stored, cached), progress=progress)

    # region exercise 2.5
    def rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first `positions` positions, or more. The tables grow with the longest sequence that is
        served, since a config.json may allow any length."""
        built = len(self._rope[0])
        if positions > built:
            rows = max(positions, min(2 * built, self.config.max_position_embeddings))
            self._rope = tables(self.config.rope_parameters, self.config.head_dim, rows, self.device)
        return self._rope

    @torch.inference_mode()
    def __call__(self, step: StepTensors, pool: Sequence[KVLayer]) -> Tensor:
        """Compute one step: store the keys and values of its tokens, return the logits [rows, vocab_size]."""
        if self._forward is None or not self._forward.takes(step):
            return self.lm_head(self.hidden(step, pool))
        return self._forward(*self.inputs(step), step, pool)

    @torch.inference_mode()
    def hidden(self, step: StepTensors, pool: Sequence[KVLayer]) -> Tensor:
        """The same step up to `lm_head`: the final hidden states [rows, hidden_size]."""
        (x, rope), residual = self.inputs(step), None
        for number, layer in enumerate(self.layers):
            q, residual = layer.before(x, residual, rope, step, pool[number])
            attended = layer.self_attn(q, pool[number], step.metadata)
            if number == len(self.layers) - 1 and step.last is not None:  # other rows end with the last attention
                attended, residual = attended[step.last], residual[step.last]
            x, residual = layer.after(attended, residual)
        x, _ = self.norm(x, residual)
        return x

    # endregion

    def inputs(self, step: StepTensors) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embeddings of a step's tokens, and tables of cos and sin that reach to its last position."""
        table = self.embed_tokens
        x = embedding(step.tokens, table) if isinstance(table, Tensor) else table.rows(step.tokens, self.dtype)
        return x, self.rope(step.metadata.max_seqlen_k)

    def _one_call(self, attend: Attend) -> "Forward | None":
        """All layers and lm_head as one kernel, for the CPU and its attention."""
        from phase2_prefill_decode.extras.cpu.forward import Forward  # here: a GPU does not need numba

        linears = self._linears()
        serves = attend is ATTEND.load("cpu") and Forward.serves(self.config, linears, self.lm_head)
        if not serves:
            return None
        norms = [
            [
                layer.input_layernorm.weight,
                layer.post_attention_layernorm.weight,
                *(layer.self_attn.qk_norm or (None, None)),
            ]
            for layer in self.layers
        ]
        return Forward(self.config, linears, norms, self.norm.weight, self.lm_head)

    def _linears(self) -> list[list[Linear]]:
        return [
            [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
            for layer in self.layers
        ]
