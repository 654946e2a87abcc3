"""The forward pass over pages, and a runner of it: what phase 2's engine computes, without its speed.

`Forward` is the model, in a page of code. It calls a dozen operations, which `operations` has in numpy. A browser's tab
has neither torch nor numpy; there the book passes the same operations in JavaScript, and all else is the engine's own.
Arrays have two dimensions: a row for each token of the step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phase0_request.batch import Batch, StepOutput
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step for the model. A sequence: its rows, the position of the first, and the slots of all its tokens."""

    batch: Batch
    tokens: list[int]
    positions: list[int]
    slots: list[int]  # where the keys and values of each row are stored
    sequences: list[tuple[int, int, int, list[int]]]  # first row, rows, position, slots
    last: list[int]  # the rows whose logits are needed


class Forward:
    """A Qwen3 model over pages. All state is in `keys` and `values`, one array of slots for each layer."""

    def __init__(self, ops: Any, config: Mapping[str, Any], weights: Mapping[str, Any], num_slots: int) -> None:
        self.ops, self.weights, self.eps = ops, weights, config["rms_norm_eps"]
        self.layers, self.head_dim = config["num_hidden_layers"], config["head_dim"]
        width = config["num_key_value_heads"] * self.head_dim
        self.keys = [ops.zeros(num_slots, width) for _ in range(self.layers)]
        self.values = [ops.zeros(num_slots, width) for _ in range(self.layers)]
        self.theta = config["rope_parameters"]["rope_theta"]

    # region forward
    def __call__(self, step: PagedStep) -> Any:
        """The logits of the step's last rows."""
        ops, w, eps, dim = self.ops, self.weights, self.eps, self.head_dim
        tokens, positions, slots = ops.integers(step.tokens), ops.integers(step.positions), ops.integers(step.slots)
        sequences = ops.sequences(step.sequences)
        x = ops.rows(w["model.embed_tokens.weight"], tokens)
        for layer in range(self.layers):
            of = f"model.layers.{layer}."
            h = ops.norm(x, w[of + "input_layernorm.weight"], eps)
            q = ops.norm(ops.linear(h, w[of + "self_attn.q_proj.weight"]), w[of + "self_attn.q_norm.weight"], eps)
            k = ops.norm(ops.linear(h, w[of + "self_attn.k_proj.weight"]), w[of + "self_attn.k_norm.weight"], eps)
            v = ops.linear(h, w[of + "self_attn.v_proj.weight"])
            ops.store(self.keys[layer], slots, ops.rotate(k, positions, dim, self.theta))
            ops.store(self.values[layer], slots, v)
            q = ops.rotate(q, positions, dim, self.theta)
            h = ops.attend(q, self.keys[layer], self.values[layer], sequences, dim)
            x = ops.add(x, ops.linear(h, w[of + "self_attn.o_proj.weight"]))
            h = ops.norm(x, w[of + "post_attention_layernorm.weight"], eps)
            h = ops.gated(ops.linear(h, w[of + "mlp.gate_proj.weight"]), ops.linear(h, w[of + "mlp.up_proj.weight"]))
            x = ops.add(x, ops.linear(h, w[of + "mlp.down_proj.weight"]))
        x = ops.norm(ops.rows(x, ops.integers(step.last)), w["model.norm.weight"], eps)
        return ops.linear(x, w["model.embed_tokens.weight"])

    # endregion


class PagedRunner:
    """Runs steps of a Forward over the pages of a cache. Draws greedily, or at a temperature."""

    def __init__(self, forward: Forward, cache: PagedCache, seed: int | None = None) -> None:
        self.forward, self.cache, self.random = forward, cache, random.Random(seed)

    def pack(self, batch: Batch) -> PagedStep:
        """Collect the tokens of all slices in one row. The pages of the batch must be allocated."""
        step, size = PagedStep(batch, [], [], [], [], []), self.cache.page_size
        for request, start, length, _ in batch:
            known = (*request.prompt_tokens, *request.output_tokens)
            table = self.cache.table(request)
            slots = [table[place // size] * size + place % size for place in range(start + length)]
            step.sequences.append((len(step.tokens), length, start, slots))
            step.tokens.extend(known[start : start + length])
            step.positions.extend(range(start, start + length))
            step.slots.extend(slots[start:])
            if start + length >= request.total:
                step.last.append(len(step.tokens) - 1)
        return step

    def launch(self, step: PagedStep) -> Drawn:
        complete = [part.request for part in step.batch if part.completes]
        logits = self.forward(step) if step.tokens else None
        drawn = iter([self.draw(request, logits, row) for row, request in enumerate(complete)])
        return Drawn([next(drawn) if part.completes else None for part in step.batch])

    def draw(self, request: Request, logits: Any, row: int) -> int:
        """The token with the largest logit, or one by its probability."""
        ops, temperature = self.forward.ops, request.params.temperature
        if temperature == 0:
            return int(ops.argmax(logits, row))
        scores = ops.row(logits, row)
        highest = max(scores)
        weights = [math.exp((score - highest) / temperature) for score in scores]
        return self.random.choices(range(len(weights)), weights)[0]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that is complete already."""

    tokens: list[int | None]

    def output(self) -> StepOutput:
        return StepOutput(self.tokens)
