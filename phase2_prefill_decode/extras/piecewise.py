"""PiecewiseGraphs: steps that contain prompts, recorded in pieces.

No two steps with a prompt have the same sequences, and the launches of attention depend on the sequences. All other
launches depend only on the number of tokens. So everything between two attentions is a graph, recorded for a few
numbers of tokens. A step is padded to the next of these numbers, and attention is launched between the graphs.

Graphs share the memory of their intermediate results. A result that attention or the next graph needs is copied to
tensors that they do not share.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.decoder import Decoder, DecoderLayer, StepTensors
from phase2_prefill_decode.extras.windows import WindowedState
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.step.graphs import Record, Replay
from phase2_prefill_decode.step.runner import ModelRunner

MOST = 4096  # tokens of a recorded step: a larger one takes even a fast device longer than the host


class PiecewiseGraphs:
    """The graphs between the attentions of one model over one pool, by number of tokens."""

    def __init__(self, decoder: Decoder, pool: Sequence[KVLayer], context: int, most: int) -> None:
        """For sequences of up to `context` tokens, and steps of up to `most`."""
        config, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.decoder, self.pool, self.context = decoder, pool, context
        self._tokens, self._positions, self._slots = torch.zeros(3, most, dtype=torch.int64, device=device)
        shape = most, config.num_attention_heads, config.head_dim
        self._query, self._attended = torch.zeros(2, *shape, dtype=dtype, device=device)
        self._residual = torch.zeros(most, config.hidden_size, dtype=dtype, device=device)
        self._graphs: dict[int, list[Replay]] = {}

    def record(self, counts: Sequence[int], record: Record) -> None:
        """Record the pieces of steps with these numbers of tokens, the largest first."""
        self._slots.fill_(-1)
        for count in tqdm(sorted(counts, reverse=True), "recording pieces", leave=False, disable=None):
            pieces = range(len(self.decoder.layers))
            self._graphs[count] = [record(partial(self._piece, number, count)) for number in pieces]

    # region piece
    @torch.inference_mode()
    def _piece(self, number: int, count: int) -> None:
        """Compute everything from the attention of the layer before up to the attention of a layer."""
        layers, rope, step = self.decoder.layers, self.decoder.rope(self.context), self._step(count)
        residual: Tensor | None
        if number == 0:
            (x, _), residual = self.decoder.inputs(step), None
        else:
            x, residual = behind_attention(layers[number - 1], self._attended[:count], self._residual[:count])
        x, residual = layers[number].input_layernorm(x, residual)
        attention = layers[number].self_attn
        q = attention.rotate_store(
            attention.qkv_proj(x),
            *rope[number],
            step.positions,
            step.slots,
            self.pool[number],
            attention.qk_norm,
            attention.eps,
        )
        self._query[:count].copy_(q)
        self._residual[:count].copy_(residual)

    @torch.inference_mode()
    def __call__(self, step: StepTensors, pool: Sequence[KVLayer]) -> Tensor:
        """Compute what `Decoder.hidden` does."""
        tokens = len(step.tokens)
        count = self.count_for(tokens) if step.metadata.sizes else 0  # without, the step is recorded as a whole
        if not count:
            return self.decoder.hidden(step, pool)
        self._tokens[:tokens].copy_(step.tokens)
        self._positions[:tokens].copy_(step.positions)
        self._slots[:tokens].copy_(step.slots)
        self._slots[tokens:count].fill_(-1)
        query, attended, residual = self._query[:tokens], self._attended[:tokens], self._residual[:tokens]
        metadata = replace(step.metadata, out=attended)
        for layer, kv, run in zip(self.decoder.layers, self.pool, self._graphs[count], strict=True):
            run()
            attention = layer.self_attn
            found = attention.attend(query, kv, metadata, attention.scale, attention.window, attention.sinks)
            attended.copy_(found)  # copies nothing if it was written there
        if step.last is not None:
            attended, residual = attended[step.last], residual[step.last]
        x, _ = self.decoder.norm(*behind_attention(layer, attended, residual))
        return x

    # endregion

    def count_for(self, tokens: int) -> int:
        """The number of tokens that a step of this many is padded to; 0 if it is launched kernel by kernel."""
        return min((count for count in self._graphs if tokens <= count), default=0)

    def _step(self, count: int) -> StepTensors:
        """A step of this many tokens without sequences, with what the pieces read of a step."""
        none = self._slots[:0]
        metadata = AttentionMetadata(none, none, none, 1, self.context)
        tokens, positions, slots = self._tokens[:count], self._positions[:count], self._slots[:count]
        return StepTensors(tokens, positions, slots, metadata, None, none, SamplingInputs(*[none] * 6))


def behind_attention(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of a layer: the output of its MLP, and the residual to add to it."""
    x, residual = layer.post_attention_layernorm(layer.self_attn.o_proj(attended.flatten(1)), residual)
    return layer.mlp(x), residual


def record_pieces(runner: ModelRunner, counts: Sequence[int], context: int, record: Record) -> None:
    """Have a runner compute steps of these token counts in pieces. Pieces need more memory than decode steps; where
    all graphs share it, record the pieces first."""
    if not all(type(layer) is DecoderLayer for layer in runner.decoder.layers):
        kind = runner.decoder.config.model_type
        raise ConfigError(f"enable_piecewise_cuda_graph records layers like Llama's; those of {kind} differ")
    if isinstance(runner.state, WindowedState) and runner.state.groups.count > 1:
        raise ConfigError("pieces have one page table for all layers: they cannot use a cache with groups of layers")
    pieces = PiecewiseGraphs(runner.decoder, runner.pool.layers, context, max(counts))
    pieces.record(counts, record)
    runner.decoder = copy(runner.decoder)
    runner.decoder.hidden = pieces  # type: ignore[method-assign]


def token_counts(most: int) -> list[int]:
    """The numbers of tokens that pieces are recorded for, if steps have up to `most`."""
    most = min(most, MOST)
    return sorted({*(count for count in (128, 256, 384, *range(512, most, 256)) if count < most), most})
