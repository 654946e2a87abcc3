"""The gated delta rule over the sequences of a step: token by token for decodes, chunk by chunk for prompts.

Within a chunk, each token would have to know what the tokens before it have written. That is a triangular system of
equations, and its solution gives what all tokens of the chunk write, as a function of the state before the chunk. All
chunks are solved at once; only the states go from chunk to chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from phase2_prefill_decode.decoder import StepTensors
from phase2_prefill_decode.extras.families.states import rows_of

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


def delta_rule(tokens: Tokens, states: Tensor, step: StepTensors) -> Tensor:
    """The results of a step, [tokens, heads, value_dim]. states: [rows, heads, key_dim, value_dim], updated."""
    assert step.rows is not None
    starts, lengths, fresh, _ = sequences(step)
    rows = step.rows.long()
    if step.metadata.max_seqlen_q == 1:
        result, after = one_token(tokens, rows_of(states, rows, fresh))
        states.index_copy_(0, rows, after)
        return result
    counts = [length for length, _ in step.metadata.sizes] or lengths.tolist()
    result = torch.empty_like(tokens.v)
    long = [number for number, count in enumerate(counts) if count > 1]
    single = [number for number, count in enumerate(counts) if count == 1]
    if single:
        own = torch.tensor(single, device=rows.device)
        at = starts[own]
        result[at], states[rows[own]] = one_token(
            Tokens(*(each[at] for each in tokens)), rows_of(states, rows[own], fresh[own])
        )
    long.sort(key=lambda number: -counts[number])  # those that still have chunks come first
    own = torch.tensor(long, device=rows.device)
    chunks = [-(-counts[number] // CHUNK) for number in long]
    # The token of each place in the chunks, which are in the order of the sequences; `none` is beyond the last token.
    none = len(tokens.v)
    first = torch.tensor(chunks).cumsum(0).sub(torch.tensor(chunks)).tolist()
    places = torch.full((sum(chunks), CHUNK), none)
    for number, chunk, count in zip(long, first, chunks, strict=True):
        begin = sum(counts[:number])
        places[chunk : chunk + count].view(-1)[: counts[number]] = torch.arange(begin, begin + counts[number])
    places = places.to(rows.device)
    padded = Tokens(*(torch.cat((each, each.new_zeros(1, *each.shape[1:])))[places].transpose(1, 2) for each in tokens))
    found, states[rows[own]] = in_chunks(padded, rows_of(states, rows[own], fresh[own]), first, chunks)
    used = places < none
    result[places[used]] = found.transpose(1, 2)[used]
    return result


def one_token(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each state [sequences, heads, key_dim, value_dim]: the results and the states after them."""
    q, k, v, g, beta = tokens
    state = state * g.exp()[..., None, None]
    known = (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def in_chunks(tokens: Tokens, state: Tensor, first: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
    """The results of chunks [chunks, heads, CHUNK, ...], and the states after them. The sequences begin at chunk
    `first` and have `counts` chunks, the longest first. Places without a token are zeros, which change no state."""
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
    begin = torch.tensor(first, device=g.device)
    for number in range(counts[0]):
        active = sum(count > number for count in counts)
        at = begin[:active] + number
        before = state[:active]
        written = write[at] - erase[at] @ before
        result[at] = q[at] @ before + scores[at] @ written
        state[:active] = before * decay[at] + k[at].mT @ written
    return result, state
