"""The gated delta rule over the sequences of a step: token by token for decodes, chunk by chunk for prompts.

Within a chunk, each token would have to know what the tokens before it have written. That is a triangular system of
equations, and its solution gives what all tokens of the chunk write, as a function of the state before the chunk. All
chunks are solved at once; only the states go from chunk to chunk.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.extras.families.states import Cuts, rows_of

CHUNK = 64  # tokens


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


class Tokens(NamedTuple):
    """What the tokens of a step ask, [tokens, heads, ...] float32."""

    q: Tensor  # [..., key_dim]
    k: Tensor
    v: Tensor  # [..., value_dim]
    g: Tensor  # the logarithm of the decay
    beta: Tensor  # how much of the difference a token writes


def delta_rule(tokens: Tokens, states: Tensor, step: StepTensors, checkpoints: Tensor | None = None) -> Tensor:
    """The results of a step, [tokens, heads, value_dim]. states: [rows, heads, key_dim, value_dim], updated; at the
    step's cuts, they are copied to slots of `checkpoints`."""
    assert step.rows is not None
    starts, lengths, fresh, _ = sequences(step)
    rows = step.rows.long()
    if step.metadata.max_seqlen_q == 1:
        result, after = one_token(tokens, rows_of(states, rows, fresh))
        states.index_copy_(0, rows, after)
        return result
    counts = [length for length, _ in step.metadata.sizes] or lengths.tolist()
    result = torch.empty_like(tokens.v)
    single = [number for number, count in enumerate(counts) if count == 1]
    if single:
        own = torch.tensor(single, device=rows.device)
        at = starts[own]
        result[at], states[rows[own]] = one_token(
            Tokens(*(each[at] for each in tokens)), rows_of(states, rows[own], fresh[own])
        )
    cuts: Cuts | None = step.metadata.plans.get(Cuts)
    chunks = Chunks.of(counts, cuts.places if cuts else ())
    own, places = (each.to(rows.device) for each in (chunks.sequences, chunks.places))
    padded = Tokens(*(torch.cat((each, each.new_zeros(1, *each.shape[1:])))[places].transpose(1, 2) for each in tokens))
    found, states[rows[own]] = in_chunks(padded, rows_of(states, rows[own], fresh[own]), chunks, checkpoints)
    used = places < len(tokens.v)
    result[places[used]] = found.transpose(1, 2)[used]
    return result


class Chunks(NamedTuple):
    """The sequences of a step with more than one token, in chunks. A chunk ends at each cut."""

    sequences: (
        Tensor  # [sequences] int64, those with most chunks first, so that those that still have chunks come first
    )
    first: list[int]  # of each of them, its first chunk
    counts: list[int]  # and the number of its chunks
    places: Tensor  # [chunks, CHUNK] int64, the token of each place; the number of all tokens: none
    copies: dict[int, list[tuple[int, int]]]  # by number of chunks: the sequences to copy after it, and their slots

    @classmethod
    def of(cls, counts: list[int], cuts: Sequence[tuple[int, int, int]]) -> "Chunks":
        """`counts`: the tokens of each sequence; `cuts`: see `Cuts.places`."""
        bounds = {number: [0, count] for number, count in enumerate(counts) if count > 1}
        for number, length, _ in cuts:
            bounds[number].insert(-1, length)
        sizes = {number: [-(-(b - a) // CHUNK) for a, b in pairwise(ends)] for number, ends in bounds.items()}
        order = sorted(bounds, key=lambda number: -sum(sizes[number]))
        totals = [sum(sizes[number]) for number in order]
        first = [sum(totals[:index]) for index in range(len(order))]
        places = torch.full((sum(totals), CHUNK), sum(counts))
        for number, chunk in zip(order, first, strict=True):
            begin = sum(counts[:number])
            for (a, b), size in zip(pairwise(bounds[number]), sizes[number], strict=True):
                places[chunk : chunk + size].view(-1)[: b - a] = torch.arange(begin + a, begin + b)
                chunk += size
        copies: dict[int, list[tuple[int, int]]] = {}
        for number, length, slot in cuts:
            before = sum(sizes[number][: bounds[number].index(length)])
            copies.setdefault(before, []).append((order.index(number), slot))
        return cls(torch.tensor(order), first, totals, places, copies)


def one_token(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each state [sequences, heads, key_dim, value_dim]: the results and the states after them."""
    q, k, v, g, beta = tokens
    state = state * g.exp()[..., None, None]
    known = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def in_chunks(
    tokens: Tokens, state: Tensor, chunks: Chunks, checkpoints: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The results of chunks [chunks, heads, CHUNK, ...], and the states after them. Places without a token are zeros,
    which change no state."""
    q, k, v, g, beta = tokens
    total = g.cumsum(-1)  # the decay since the chunk began
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    scaled = k * beta[..., None]
    system = (scaled @ k.mT) * between
    write = torch.linalg.solve_triangular(system, v * beta[..., None], upper=False, unitriangular=True)
    erase = torch.linalg.solve_triangular(system, scaled * total.exp()[..., None], upper=False, unitriangular=True)
    scores = (q @ k.mT) * between
    q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    decay = total[..., -1].exp()[..., None, None]
    result, state = torch.empty_like(v), state.clone()
    begin = torch.tensor(chunks.first, device=g.device)
    for number in range(chunks.counts[0]):
        active = sum(count > number for count in chunks.counts)
        at = begin[:active] + number
        before = state[:active]
        written = write[at] - erase[at] @ before
        result[at] = q[at] @ before + scores[at] @ written
        state[:active] = before * decay[at] + k[at].mT @ written
        if (copies := chunks.copies.get(number + 1)) and checkpoints is not None:
            own, slots = torch.tensor(copies, device=state.device).T
            checkpoints[slots] = state[own]
    return result, state
