# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A whole decode step in one call: all layers and the logits, on all threads. Also of drafts that it verifies.

Of a small model, an operator computes for a few microseconds, and calling it takes as long. Here the threads start once
a step and go through the same operations as `decoder.py`, with the same functions as the other kernels. The work of an
operation is cut into items. A thread takes one after the other, and goes on when all items are done, by whichever
thread. What an operation writes for others is written once a step and read by the next operation only when complete,
so a thread that comes late finds no item left, and all that it reads complete.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from threading import Lock
from weakref import ref

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.decoder import Decoder, DecoderLayer, StepTensors
from phase2_prefill_decode.extras.cpu.attention import write
from phase2_prefill_decode.extras.cpu.intrinsics import KV_TAGS, NO_TENSOR, TAGS, address, array, compiled, kernel
from phase2_prefill_decode.extras.cpu.microkernel import BLOCK
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, USLEEP, address_of, call, peek, spread, take
from phase2_prefill_decode.extras.cpu.pointwise import add, check_places, gate, norm, put, rotate
from phase2_prefill_decode.extras.cpu.product import WEIGHT_NUMBERS, PackedWeight, described, lay_row, write_block
from phase2_prefill_decode.extras.cpu.tiles import TILE, attend_tile, query_tag, room_for
from phase2_prefill_decode.extras.linears import linears_of, products_of
from phase2_prefill_decode.kernels.attention import check_shapes
from phase2_prefill_decode.linear import Linear
from phase2_prefill_decode.loading.config import ModelConfig

MAX_TOKENS = 32  # in a step
SPINS = 20_000  # some ten microseconds
NAP = 20  # microseconds; meanwhile another thread can have this core

FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
LAYER_COLUMNS = 4 * 2 + 9

Packed = Sequence[PackedWeight]  # several, if a matrix has several formats


def whole_step(decoder: Decoder) -> "Forward | None":
    """A decoder's layers and lm_head in one call, if they can be."""
    if not all(type(layer) is DecoderLayer for layer in decoder.layers):
        return None
    layers, lm_head = [[*map(packed, linears)] for linears in linears_of(decoder)], packed(decoder.lm_head)
    if not Forward.serves(decoder.config, layers, lm_head):
        return None
    norms = [
        [
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            *(layer.self_attn.qk_norm or (None, None)),
        ]
        for layer in decoder.layers
    ]
    return Forward(decoder.config, layers, norms, decoder.norm.weight, lm_head)


def packed(linear: Linear) -> Packed:
    return [weight for weight in products_of(linear) if isinstance(weight, PackedWeight)]


class Forward:
    """The layers and lm_head of a model, for steps of up to MAX_TOKENS tokens that all need logits, or of slices of up
    to two: a draft model's after a draft that was accepted whole."""

    def __init__(
        self,
        config: ModelConfig,
        linears: Sequence[Sequence[Packed]],
        norms: Sequence[Sequence[Tensor | None]],
        norm: Tensor,
        lm_head: Packed,
    ) -> None:
        """`linears`: qkv_proj, o_proj, gate_up_proj and down_proj of each layer. `norms`: the weights before attention,
        before the MLP, of q and of k."""
        self.config, dtype = config, norm.dtype
        self._norm, self._others = norm, norms
        self._weights = [*chain(*linears), lm_head]
        self._numbers = [np.array([weight.numbers(dtype) for weight in weights]) for weights in self._weights]
        places = [(numbers.ctypes.data, len(numbers)) for numbers in self._numbers]
        self._head = places.pop()
        self._table = np.array(
            [
                [*chain(*places[4 * layer : 4 * layer + 4]), *map(address, others), window or 1 << 40, 0, 0, 0, 0]
                for layer, (others, window) in enumerate(zip(norms, config.windows, strict=True))
            ],
            np.int64,
        )
        self._stride = max(weight.stride(dtype) for weight in chain(*self._weights))
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        numbers = (3 * heads + 2 * kv_heads) * head_dim + 2 * config.hidden_size + config.intermediate_size
        self._shared = torch.empty(config.num_hidden_layers * MAX_TOKENS * numbers, dtype=dtype)
        self._lock = Lock()  # guards the memory that steps share
        self._pool: Callable[[], Tensor | None] = lambda: (
            None
        )  # of whose layers the table has the addresses: its first tensor
        self._counters = torch.empty(5 * config.num_hidden_layers + 1, 2, 8, dtype=torch.int64)  # a cache line each

    @staticmethod
    def serves(config: ModelConfig, linears: Sequence[Sequence[Packed]], lm_head: Packed) -> bool:
        """Whether no inputs of a matrix have another order, and a block of gate and one of up have the same columns."""
        in_order = all(weight.order is None for weight in chain(*chain(*linears), lm_head))
        whole = config.intermediate_size % BLOCK == 0 and all(len(gate_up) == 1 for _, _, gate_up, _ in linears)
        return in_order and whole

    @staticmethod
    def takes(step: StepTensors) -> bool:
        return len(step.tokens) <= MAX_TOKENS and (step.last is None or step.metadata.max_seqlen_q <= 2)

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], step: StepTensors, layers: Sequence[KVLayer]) -> Tensor:
        """x: [tokens, hidden_size], the embedded tokens. Returns the logits [rows, vocab_size]."""
        c, tokens, metadata = self.config, len(x), step.metadata
        logits = torch.empty((tokens, c.vocab_size), dtype=x.dtype)
        with self._lock:  # the call lets other Python threads run
            if layers[0].keys is not self._pool():
                check_shapes(x.new_empty(0, c.num_attention_heads, c.head_dim), layers[0])
                self._table[:, -4:] = [[address(side) for side in kv] for kv in layers]
                self._pool = ref(layers[0].keys)
            forward_kernel(
                forward_body(x.dtype, layers[0].keys.dtype),
                (x.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(), step.positions.data_ptr(),
                 step.slots.data_ptr(), metadata.cu_seqlens_q.data_ptr()),
                (metadata.seq_lens.data_ptr(), metadata.page_table.data_ptr(), logits.data_ptr()),
                (self._table.ctypes.data, *self._head, self._norm.data_ptr()),
                (self._shared.data_ptr(), self._counters.data_ptr(), USLEEP),
                (tokens, c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.vocab_size, c.num_attention_heads,
                 c.head_dim, len(rope[0]), *layers[0].keys.shape[:3], *metadata.page_table.shape, metadata.max_seqlen_q,
                 self._stride),
                c.rms_norm_eps,
                torch.get_num_threads() if OPENMP else 1,
                OPENMP,
            )  # fmt: skip
        return logits if step.last is None else logits[step.last]


@kernel
def forward_kernel(body, inputs, places, weights, memory, sizes, eps, threads, openmp):
    """Check all positions and slots before anything is written."""
    tokens, layers = sizes[0], sizes[1]
    check_places(inputs[3], inputs[4], tokens, sizes[7], sizes[8] * sizes[10])
    array(memory[1], (5 * layers + 1, 2, 8), INT64)[:] = 0
    scale = np.float64(math.log2(math.e) / math.sqrt(sizes[6]))
    numbers = np.float64(eps).view(np.int64), scale.view(np.int64)
    spread(body, np.array((*inputs, *places, *weights, *memory, *sizes, *numbers)), threads, openmp)


# region forward
@cache
def forward_body(dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """The body of a thread, for a model in one dtype, and keys and values in another. Weights have any format."""
    like, kv_like, q_like = TAGS[dtype], KV_TAGS[kv_dtype], query_tag(dtype, kv_dtype)

    def body(work):
        (
            x, cos, sin, positions, slots, cu_seqlens_q, seq_lens, page_table, logits, table, head, head_parts,
            last_norm, shared, counters, usleep, tokens, layers, hidden, inner, vocab, heads, head_dim, most_positions,
            pages, kv_heads, page_size, sequences, max_pages, new, stride, eps, scale,
        ) = to_fixed_tuple(array(work, (33,), INT64), 33)  # fmt: skip
        eps = np.float32(np.int64(eps).view(np.float64))
        scale = np.float32(np.int64(scale).view(np.float64))
        x, logits = array(x, (tokens, hidden), like), array(logits, (tokens, vocab), like)
        angles = (
            array(cos, (most_positions, head_dim // 2), FLOAT32),
            array(sin, (most_positions, head_dim // 2), FLOAT32),
        )
        batch = (
            array(positions, (tokens,), INT64), array(slots, (tokens,), INT64),
            array(cu_seqlens_q, (sequences + 1,), INT32), array(seq_lens, (sequences,), INT32),
            array(page_table, (sequences, max_pages), INT32),
        )  # fmt: skip
        pool = pages, kv_heads, page_size, head_dim
        residual, normed = np.empty((tokens, hidden), x.dtype), np.empty((tokens, hidden), x.dtype)
        sums, left = np.empty((tokens, BLOCK), np.float32), np.empty((tokens, stride), np.uint8)
        room = np.empty(room_for(new * (heads // kv_heads), head_dim), np.float32)
        residual[:] = 0
        for layer in range(layers):
            row = array(table + layer * LAYER_COLUMNS * 8, (LAYER_COLUMNS,), INT64)
            in_norm, post_norm, q_norm, k_norm, window, keys, values, key_scales, value_scales = to_fixed_tuple(
                row[8:], 9
            )
            qkv, shared = carve(shared, tokens, (heads + 2 * kv_heads) * head_dim, like)
            q, shared = carve(shared, tokens, heads * head_dim, like)
            attended, shared = carve(shared, tokens, heads * head_dim, like)
            projected, shared = carve(shared, tokens, hidden, like)
            activated, shared = carve(shared, tokens, inner, like)
            down, shared = carve(shared, tokens, hidden, like)

            add_norm(x, residual, in_norm, eps, normed)
            linear(normed, row[:2], qkv, left, sums, counters, usleep)
            counters += 128
            attention(
                qkv.reshape((tokens, heads + 2 * kv_heads, head_dim)), q.reshape((tokens, heads, head_dim)),
                attended.reshape((tokens, heads, head_dim)), array(keys, pool, kv_like), array(values, pool, kv_like),
                (key_scales, value_scales), angles, batch, q_norm, k_norm, eps, (q_like, window, scale, room), counters,
                usleep,
            )  # fmt: skip
            counters += 128
            linear(attended, row[2:4], projected, left, sums, counters, usleep)
            counters += 128
            add_norm(projected, residual, post_norm, eps, normed)
            mlp(normed, row[4], activated, left, sums, counters, usleep)
            counters += 128
            linear(activated, row[6:8], down, left, sums, counters, usleep)
            counters += 128
            x = down
        add_norm(x, residual, last_norm, eps, normed)
        linear(normed, (head, head_parts), logits, left, sums, counters, usleep)

    return address_of(body)


# endregion


@compiled()
def carve(address, rows, width, like):
    """A matrix at an address, and the address behind it."""
    matrix = array(address, (rows, width), like)
    return matrix, address + matrix.nbytes


@compiled()
def add_norm(x, residual, weight, eps, normed):
    """Computed by every thread: this takes less time than waiting for another thread."""
    weight = array(weight, (x.shape[1],), x[0, 0])
    for row in range(len(x)):
        add(x[row], residual[row], residual[row])
        norm(residual[row], weight, eps, normed[row])


@compiled()
def lay_rows(x, weight, left):
    """Write rows as the tiles of a weight take them. Every thread has its own."""
    for row in range(len(x)):
        lay_row(weight, x[row], left[row])


# region finish
@compiled()
def finish(done, items, usleep):
    """Wait until all items are done: spin a little, then sleep, for the thread that has the last may need this core."""
    spins = 0
    while peek(done) < items:
        spins += 1
        if spins > SPINS:
            call(usleep, (NAP,))


# endregion


@compiled()
def linear(x, weights, result, left, sums, counters, usleep):
    """result = x @ weight.T, of one or several weights: their address, and how many. An item is a block."""
    weight, items, start, item = weights[0], 0, 0, take(counters)
    for _ in range(weights[1]):
        lay_rows(x, weight, left)
        outputs, first = described(weight)[2], items
        items += -(-outputs // BLOCK)
        while item < items:
            write_block(weight, item - first, left, sums, result, start + (item - first) * BLOCK)
            take(counters + 64)
            item = take(counters)
        weight, start = weight + WEIGHT_NUMBERS * 8, start + outputs
    finish(counters + 64, items, usleep)


@compiled()
def mlp(x, weight, result, left, sums, counters, usleep):
    """silu(gate) * up, of the two halves of the fused projection."""
    lay_rows(x, weight, left)
    items, opened = result.shape[1] // BLOCK, np.empty((2, len(x), BLOCK), result.dtype)
    item = take(counters)
    while item < items:
        write_block(weight, item, left, sums, opened[0], 0)
        write_block(weight, items + item, left, sums, opened[1], 0)
        for row in range(len(x)):
            gate(opened[0, row], opened[1, row], result[row, item * BLOCK : (item + 1) * BLOCK])
        take(counters + 64)
        item = take(counters)
    finish(counters + 64, items, usleep)


@compiled()
def attention(qkv, q, attended, keys, values, scales, angles, batch, q_norm, k_norm, eps, others, counters, usleep):
    """An item is a KV head of a sequence: store its new keys and values, then attend."""
    (_, heads, head_dim), kv_heads, (_, window, _, _) = q.shape, keys.shape[1], others
    group, page_size = heads // kv_heads, keys.shape[2]
    positions, slots, cu_seqlens_q, seq_lens, page_table = batch
    has_norms, normed, turned = q_norm != NO_TENSOR, np.empty(head_dim, q.dtype), np.empty(head_dim, q.dtype)
    q_norm, k_norm = array(q_norm, (head_dim,), q[0, 0, 0]), array(k_norm, (head_dim,), q[0, 0, 0])
    tiles = np.zeros(1, TILE)
    item = take(counters)
    while item < len(seq_lens) * kv_heads:
        sequence, head = item // kv_heads, item % kv_heads
        first, stop = np.int64(cu_seqlens_q[sequence]), np.int64(cu_seqlens_q[sequence + 1])
        for token in range(first, stop):
            turn = angles[0][positions[token]], angles[1][positions[token]]
            page, offset = slots[token] // page_size, slots[token] % page_size
            for row in range(head * group, (head + 1) * group):
                x = qkv[token, row]
                if has_norms:
                    norm(x, q_norm, eps, normed)
                    x = normed
                rotate(x, turn, q[token, row])
            if slots[token] >= 0:
                x = qkv[token, heads + head]
                if has_norms:
                    norm(x, k_norm, eps, normed)
                    x = normed
                rotate(x, turn, turned)
                put(turned, keys, scales[0], page, head, offset)
                put(qkv[token, heads + kv_heads + head], values, scales[1], page, head, offset)
        tile, length = tiles[0], np.int64(seq_lens[sequence])
        position = length - (stop - first)
        tile.sequence, tile.first, tile.tokens, tile.position, tile.split = sequence, first, stop - first, position, -1
        tile.head, tile.heads, tile.begin, tile.end = head, 1, max(position + 1 - window, 0), length
        state = attend_tile(tile, q, (keys, values, scales, page_table), *others)
        write(tile, group, state, attended, NO_TENSOR)
        take(counters + 64)
        item = take(counters)
    finish(counters + 64, len(seq_lens) * kv_heads, usleep)
