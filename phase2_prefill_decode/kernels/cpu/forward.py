# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A whole decode step of a small model in one call: all layers and the logits, on all threads.

Of a small model, an operator computes for a few microseconds, and calling it takes as long. Here the threads start once
a step and go through the same operations as `decoder.py`, with the same functions as the other kernels. The work of an
operation is cut into items. A thread takes one after the other, and goes on when all items are done, by whichever
thread. What an operation writes for others is written once a step and read by the next operation only when complete,
so a thread that comes late finds no item left, and all that it reads complete.
"""

import math
from collections.abc import Sequence
from functools import cache
from threading import Lock

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.kernels.attention import check_shapes
from phase2_prefill_decode.kernels.cpu.attention import write
from phase2_prefill_decode.kernels.cpu.intrinsics import TAGS, array, compiled, kernel, narrow
from phase2_prefill_decode.kernels.cpu.matvec import TILE, fits, multiply_tile, pack_tiles, split
from phase2_prefill_decode.kernels.cpu.openmp import OPENMP, USLEEP, call, on_each_thread, peek, spread, take
from phase2_prefill_decode.kernels.cpu.pointwise import NO_TENSOR, add, check_places, gate, norm, rotate
from phase2_prefill_decode.kernels.cpu.tiles import TILE as ATTENTION_TILE
from phase2_prefill_decode.kernels.cpu.tiles import attend_tile, room_for
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import LayerWeights, Weights
from phase2_prefill_decode.step.packed import StepTensors

TOKENS = 4  # of a step, at most
BYTES = 128 << 20  # of weights, at most: the matrices are kept twice, for these steps and for others
ITEM = 4  # tiles
SPINS = 20_000  # some ten microseconds
NAP = 20  # microseconds; meanwhile another thread can have this core

FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
MATRICES = "qkv_proj", "o_proj", "gate_up_proj", "down_proj"
OTHERS = "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"


class Forward:
    """The layers and lm_head of a small model, for steps of up to TOKENS sequences with one new token each."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._norm, self._kept = weights.norm, [_others(layer) for layer in weights.layers]  # used where they are
        numbers = sum(matrix.numel() for matrix in _matrices(weights))
        self._packed = torch.from_numpy(np.empty(numbers, np.int16)).view(torch.bfloat16)  # NumPy asks for huge pages
        addresses = iter(self._pack(weights))
        self._table = np.array(
            [
                [*(next(addresses) for _ in MATRICES), *map(_address, others), window or 1 << 40, 0, 0]
                for others, window in zip(self._kept, config.sliding_windows, strict=True)
            ],
            np.int64,
        )
        self._lm_head = next(addresses)
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        numbers = (3 * heads + 2 * kv_heads) * head_dim + 2 * config.hidden_size + config.intermediate_size
        self._shared = torch.empty(config.num_hidden_layers * TOKENS * numbers, dtype=torch.bfloat16)
        self._lock = Lock()  # of the memory that steps share
        self._counters = torch.empty(5 * config.num_hidden_layers + 1, 2, 8, dtype=torch.int64)  # a cache line each

    @staticmethod
    def serves(config: ModelConfig, weights: Weights) -> bool:
        on_cpu = weights.norm.device.type == "cpu" and weights.norm.dtype == torch.bfloat16
        small = on_cpu and config.bytes <= BYTES and config.intermediate_size % TILE == 0
        biases = (getattr(layer, f"{name}_bias") for layer in weights.layers for name in MATRICES)
        plain = all(isinstance(matrix, Tensor) for matrix in _matrices(weights))
        return small and plain and all(map(fits, _matrices(weights))) and all(bias is None for bias in biases)

    @staticmethod
    def takes(step: StepTensors) -> bool:
        return step.metadata.max_seqlen_q == 1 and len(step.tokens) <= TOKENS

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        step: StepTensors,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> Tensor:
        """x: [tokens, hidden_size], the embedded tokens. Returns the logits [rows, vocab_size]."""
        c, tokens, metadata = self.config, len(x), step.metadata
        logits = torch.empty((tokens, c.vocab_size), dtype=x.dtype)
        check_shapes(x.new_empty(0, c.num_attention_heads, c.head_dim), keys[0], values[0])
        with self._lock:  # the call lets other Python threads run
            for row, k, v in zip(self._table, keys, values, strict=True):
                row[-2], row[-1] = k.data_ptr(), v.data_ptr()
            forward_kernel(
                forward_body(),
                (x.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(), step.positions.data_ptr(),
                 step.slots.data_ptr()),
                (metadata.seq_lens.data_ptr(), metadata.page_table.data_ptr(), logits.data_ptr()),
                (self._table.ctypes.data, self._lm_head, self._norm.data_ptr()),
                (self._shared.data_ptr(), self._counters.data_ptr(), USLEEP),
                (tokens, c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.vocab_size, c.num_attention_heads,
                 c.head_dim, len(rope[0]), *keys[0].shape[:3], metadata.page_table.shape[1]),
                c.rms_norm_eps,
                torch.get_num_threads() if OPENMP else 1,
                OPENMP,
            )  # fmt: skip
        return logits if step.last is None else logits[step.last]

    def _pack(self, weights: Weights) -> list[int]:
        """Pack all matrices into one piece of memory; return their addresses."""
        places, start = [], 0
        for matrix in _matrices(weights):
            place = self._packed[start : start + matrix.numel()]
            pack_tiles(matrix, place)
            places.append(place.data_ptr())
            start += matrix.numel()
        return places


def _matrices(weights: Weights) -> list[Tensor]:
    return [getattr(layer, name) for layer in weights.layers for name in MATRICES] + [weights.lm_head]


def _others(layer: LayerWeights) -> list[Tensor | None]:
    return [getattr(layer, name) for name in OTHERS]


def _address(tensor: Tensor | None) -> int:
    return NO_TENSOR if tensor is None else tensor.data_ptr()


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
def forward_body() -> int:
    like = TAGS[torch.bfloat16]

    def body(work):
        (
            x, cos, sin, positions, slots, seq_lens, page_table, logits, table, lm_head, last_norm, shared, counters,
            usleep, tokens, layers, hidden, inner, vocab, heads, head_dim, most_positions, pages, kv_heads, page_size,
            max_pages, eps, scale,
        ) = to_fixed_tuple(array(work, (28,), INT64), 28)  # fmt: skip
        eps = np.float32(np.int64(eps).view(np.float64))
        scale = np.float32(np.int64(scale).view(np.float64))
        x, logits = array(x, (tokens, hidden), like), array(logits, (tokens, vocab), like)
        angles = (
            array(cos, (most_positions, head_dim // 2), FLOAT32),
            array(sin, (most_positions, head_dim // 2), FLOAT32),
        )
        batch = (
            array(positions, (tokens,), INT64), array(slots, (tokens,), INT64), array(seq_lens, (tokens,), INT32),
            array(page_table, (tokens, max_pages), INT32),
        )  # fmt: skip
        pool, table = (pages, kv_heads, page_size, head_dim), array(table, (layers, 11), INT64)
        residual, normed = np.empty((tokens, hidden), x.dtype), np.empty((tokens, hidden), x.dtype)
        halves = np.empty(tokens * max(hidden, inner, heads * head_dim), np.float32)
        sums = np.empty((2, tokens, TILE), np.float32)
        room = np.empty(room_for(heads // kv_heads, head_dim), np.float32)
        residual[:] = 0
        for layer in range(layers):
            (
                qkv_proj, o_proj, gate_up_proj, down_proj, in_norm, post_norm, q_norm, k_norm, window, keys, values,
            ) = to_fixed_tuple(table[layer], 11)  # fmt: skip
            qkv, shared = carve(shared, tokens, (heads + 2 * kv_heads) * head_dim, like)
            q, shared = carve(shared, tokens, heads * head_dim, like)
            attended, shared = carve(shared, tokens, heads * head_dim, like)
            projected, shared = carve(shared, tokens, hidden, like)
            activated, shared = carve(shared, tokens, inner, like)
            down, shared = carve(shared, tokens, hidden, like)

            inputs = add_norm(x, residual, in_norm, eps, normed, halves)
            linear(inputs, qkv_proj, qkv, sums, counters, usleep)
            counters += 128
            attention(
                qkv.reshape((tokens, heads + 2 * kv_heads, head_dim)), q.reshape((tokens, heads, head_dim)),
                attended.reshape((tokens, heads, head_dim)), array(keys, pool, like), array(values, pool, like), angles,
                batch, q_norm, k_norm, eps, scale, window, room, counters, usleep,
            )  # fmt: skip
            counters += 128
            linear(split_all(attended, halves), o_proj, projected, sums, counters, usleep)
            counters += 128
            inputs = add_norm(projected, residual, post_norm, eps, normed, halves)
            mlp(inputs, gate_up_proj, activated, sums, counters, usleep)
            counters += 128
            linear(split_all(activated, halves), down_proj, down, sums, counters, usleep)
            counters += 128
            x = down
        inputs = add_norm(x, residual, last_norm, eps, normed, halves)
        linear(inputs, lm_head, logits, sums, counters, usleep)

    return on_each_thread(body)


# endregion


@compiled()
def carve(address, rows, width, like):
    """A matrix at an address, and the address behind it."""
    return array(address, (rows, width), like), address + rows * width * 2


@compiled()
def split_all(x, halves):
    halves = halves[: x.size].reshape(x.shape)
    for row in range(len(x)):
        split(x[row], halves[row])
    return halves


@compiled()
def add_norm(x, residual, weight, eps, normed, halves):
    """Computed by every thread: this takes less time than waiting for another thread."""
    weight = array(weight, (x.shape[1],), x[0, 0])
    for row in range(len(x)):
        add(x[row], residual[row], residual[row])
        norm(residual[row], weight, eps, normed[row])
    return split_all(normed, halves)


# region finish
@compiled()
def finish(done, items, usleep):
    """Wait until all items are done: spin a little, then sleep, for the thread that has the last may need this core."""
    spins = 0
    while peek(done) < items:
        spins += 1
        if spins > SPINS:
            call(usleep, NAP)


# endregion


@compiled()
def store(sums, first, result):
    """Round the sums of a tile for one row."""
    for i in range(TILE):
        result[first + i] = narrow(sums[i], result[0])


@compiled()
def linear(halves, weight, result, sums, counters, usleep):
    """result = rows @ weight.T."""
    tiles = result.shape[1] // TILE
    items = -(-tiles // ITEM)
    item = take(counters)
    while item < items:
        for tile in range(item * ITEM, min((item + 1) * ITEM, tiles)):
            multiply_tile(weight, tile, halves, sums[0])
            for row in range(len(result)):
                store(sums[0, row], tile * TILE, result[row])
        take(counters + 64)
        item = take(counters)
    finish(counters + 64, items, usleep)


@compiled()
def mlp(halves, weight, result, sums, counters, usleep):
    """silu(gate) * up, of the two halves of the fused projection."""
    inner, opened = result.shape[1], np.empty((2, result.shape[1]), result.dtype)
    tiles = inner // TILE
    items = -(-tiles // ITEM)
    item = take(counters)
    while item < items:
        for tile in range(item * ITEM, min((item + 1) * ITEM, tiles)):
            multiply_tile(weight, tile, halves, sums[0])
            multiply_tile(weight, tiles + tile, halves, sums[1])
            first, end = tile * TILE, (tile + 1) * TILE
            for row in range(len(result)):
                store(sums[0, row], first, opened[0])
                store(sums[1, row], first, opened[1])
                gate(opened[0, first:end], opened[1, first:end], result[row, first:end])
        take(counters + 64)
        item = take(counters)
    finish(counters + 64, items, usleep)


@compiled()
def attention(
    qkv, q, attended, keys, values, angles, batch, q_norm, k_norm, eps, scale, window, room, counters, usleep
):
    """An item is a KV head of a sequence: store its new key and value, then attend."""
    (tokens, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    group, page_size = heads // kv_heads, keys.shape[2]
    positions, slots, seq_lens, page_table = batch
    has_norms, normed = q_norm != NO_TENSOR, np.empty(head_dim, q.dtype)
    q_norm, k_norm = array(q_norm, (head_dim,), q[0, 0, 0]), array(k_norm, (head_dim,), q[0, 0, 0])
    tiles = np.zeros(1, ATTENTION_TILE)
    item = take(counters)
    while item < tokens * kv_heads:
        token, head = item // kv_heads, item % kv_heads
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
            rotate(x, turn, keys[page, head, offset])
            values[page, head, offset] = qkv[token, heads + kv_heads + head]
        tile, length = tiles[0], np.int64(seq_lens[token])
        tile.sequence, tile.first, tile.tokens, tile.position, tile.split = token, token, 1, length - 1, -1
        tile.head, tile.heads, tile.begin, tile.end = head, 1, max(length - window, 0), length
        state = attend_tile(tile, q, (keys, values, page_table), window, scale, room)
        write(tile, group, state, attended)
        take(counters + 64)
        item = take(counters)
    finish(counters + 64, tokens * kv_heads, usleep)
