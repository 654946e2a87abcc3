"""Batches for paged attention, each with the result of an oracle that does not use pages.

The oracle is torch's own attention in float64, sequence by sequence, on keys and values in one piece. Only then are
they cut into pages, by plain indexing, in a pool that is NaN wherever no live token lies.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from phase1_kv_pool.layer import KVLayer
from phase2_prefill_decode.kernels.attention import Attend, AttentionMetadata
from tests.phase1_kv_pool.support import device_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
NO_PAGE = 2**31 - 1  # fills a page table behind its last page: a kernel that reads there crashes


def in_8_bits(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads as 8-bit numbers with a scale for each: the largest number of a head is the largest of the format."""
    scales = x.float().abs().amax(-1) / torch.tensor(127.0 if dtype == torch.int8 else torch.finfo(dtype).max)
    numbers = x.float() / scales[..., None]
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@dataclass(frozen=True)
class Inputs:
    """The arguments of `attend`, and the contiguous keys and values of each sequence."""

    query: Tensor
    kv: KVLayer
    metadata: AttentionMetadata
    k: list[Tensor]  # [length, kv_heads, head_dim]; dequantized
    v: list[Tensor]
    tables: list[list[int]]


@dataclass(frozen=True)
class Case:
    """A ragged batch: for each sequence how many tokens it has, and how many of them are new."""

    lengths: list[int]
    new: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    scale: float | None = None
    spread: float = 1.0  # of the queries; a large one makes a softmax with one winner
    sinks: tuple[float, ...] = ()  # of each head; (): none

    def inputs(self, backend: str, dtype: torch.dtype, stored: torch.dtype | None = None) -> Inputs:
        """`stored`: the 8-bit format of keys and values; None: the dtype of the queries."""
        torch.manual_seed(sum(self.lengths))
        device = device_of(backend)
        query = (torch.randn(sum(self.new), self.heads, self.head_dim) * self.spread).to(dtype)
        k = [torch.randn(length, self.kv_heads, self.head_dim).to(dtype) for length in self.lengths]
        v = [torch.randn(length, self.kv_heads, self.head_dim).to(dtype) for length in self.lengths]
        counts = [-(-length // self.page_size) for length in self.lengths]
        free = torch.randperm(sum(counts) + 3).tolist()
        tables = [[free.pop() for _ in range(count)] for count in counts]
        shape = sum(counts) + 3, self.kv_heads, self.page_size, self.head_dim
        kv = [torch.full(shape, torch.nan, dtype=dtype) for _ in "kv"]
        if stored is not None:
            kv = [
                *(torch.full(shape, 77.0).to(stored) for _ in "kv"),
                *(torch.full(shape[:3], torch.nan) for _ in "kv"),
            ]
        for sequence, table in enumerate(tables):
            positions = torch.arange(self.lengths[sequence])
            page, offset = (
                torch.tensor(table, dtype=torch.long)[positions // self.page_size],
                positions % self.page_size,
            )
            for side, all_x in enumerate((k, v)):
                if stored is None:
                    kv[side][page, :, offset] = all_x[sequence]
                else:
                    numbers, scales = in_8_bits(all_x[sequence], stored)
                    kv[side][page, :, offset], kv[side + 2][page, :, offset] = numbers, scales
                    all_x[sequence] = numbers.double() * scales.double()[..., None]
        pages = torch.full((len(tables), max(counts) + 2), NO_PAGE, dtype=torch.int32)
        for row, table in zip(pages, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *self.new], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=device),
            page_table=pages.to(device),
            max_seqlen_q=max(self.new),
            max_seqlen_k=max(self.lengths),
            sizes=tuple(zip(self.new, self.lengths, strict=True)),
        )
        return Inputs(query.to(device), KVLayer(*(side.to(device) for side in kv)), metadata, k, v, tables)

    def alone(self, inputs: Inputs) -> Iterator[tuple["Case", Inputs]]:
        """Each sequence as a batch of its own, in the same pool."""
        queries = inputs.query.split(self.new)
        for number, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            metadata = AttentionMetadata(
                torch.tensor([0, new], dtype=torch.int32, device=inputs.query.device),
                inputs.metadata.seq_lens[number : number + 1],
                inputs.metadata.page_table[number : number + 1],
                new,
                length,
                ((new, length),),
            )
            yield replace(self, lengths=[length], new=[new]), replace(inputs, query=queries[number], metadata=metadata)

    def run(self, attend: Attend, inputs: Inputs) -> Tensor:
        """The result of `attend`, on the CPU. It must not change its arguments."""
        arguments = [side for side in (inputs.query, *inputs.kv) if side is not None]
        before = [side.clone() for side in arguments]
        sinks = torch.tensor(self.sinks, dtype=inputs.query.dtype).to(inputs.query.device) if self.sinks else None
        found = attend(inputs.query, inputs.kv, inputs.metadata, self.scaling, self.window, sinks)
        assert all(map(same_bits, arguments, before))
        assert found.shape == inputs.query.shape
        assert found.dtype == inputs.query.dtype
        return found.cpu()

    def assert_close(self, found: Tensor, wanted: Tensor, tolerance: float) -> None:
        """`found` is the oracle's result. A failure names the first token that is not, and what it should attend to."""
        off = (found.double() - wanted).abs() > tolerance * (1 + wanted.abs())
        off |= found.isnan() != wanted.isnan()
        if off.any():
            row, head = (int(place) for place in off.any(-1).nonzero()[0])
            sequence = next(number for number in range(len(self.new)) if row < sum(self.new[: number + 1]))
            position = self.lengths[sequence] - sum(self.new[: sequence + 1]) + row
            first = 0 if self.window is None else max(position - self.window + 1, 0)
            raise AssertionError(
                f"sequence {sequence} of {self.lengths[sequence]} tokens, {self.new[sequence]} of them new, in pages "
                f"of {self.page_size}: the token at position {position}, which sees keys {first} to {position}, has a "
                f"wrong result in head {head} of {self.heads}; wrong are {int(off.any(-1).any(-1).sum())} of "
                f"{len(found)} tokens. Found {found[row, head, :3].tolist()}..., "
                f"wanted {wanted[row, head, :3].tolist()}..."
            )

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def oracle(self, inputs: Inputs) -> Tensor:
        """[tokens, heads, head_dim] in float64. A sink is the score of a further key, whose value is 0."""
        queries = inputs.query.cpu().split(self.new)
        sinks = torch.tensor(self.sinks).to(inputs.query.dtype).double()
        rows = []
        for query, k, v in zip(queries, inputs.k, inputs.v, strict=True):
            new, length = len(query), len(k)
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
            if self.window is not None:
                mask = mask.triu(length - new - self.window + 1)
            q, k, v = (side.transpose(0, 1).double() for side in (query, k, v))
            if new > 0:
                if self.sinks:
                    k, v = (torch.cat((side, torch.zeros_like(side[:, :1])), 1) for side in (k, v))
                    scores = torch.zeros(self.heads, new, length + 1, dtype=torch.double)
                    scores[:, :, :length].masked_fill_(~mask, -torch.inf)
                    scores[:, :, length] = sinks[:, None]
                    mask = scores
                rows.append(scaled_dot_product_attention(q, k, v, mask, scale=self.scaling, enable_gqa=True))
        return torch.cat(rows, 1).transpose(0, 1)


def prompts(*lengths: int, **shape: object) -> Case:
    return Case(list(lengths), list(lengths), **shape)  # type: ignore[arg-type]


def decodes(*lengths: int, **shape: object) -> Case:
    return Case(list(lengths), [1] * len(lengths), **shape)  # type: ignore[arg-type]


ONE_KV_HEAD: dict[str, Any] = {"heads": 2, "kv_heads": 1}  # where only lengths matter: all KV heads are alike

EDGES = {
    "first_token": decodes(1),
    "around_a_page": decodes(15, 16, 17),
    "decodes_of_any_length": decodes(1, 70, 16, 3, 129),
    "a_decode_over_many_splits": decodes(1100, **ONE_KV_HEAD),
    "long_beside_short": decodes(1025, 1, 513, 300, **ONE_KV_HEAD),
    "around_512": decodes(511, 512, 513, **ONE_KV_HEAD),
    "prompts_around_a_page": prompts(15, 16, 17),
    "prompts_around_tiles": prompts(63, 64, 65, 127, 129, **ONE_KV_HEAD),
    "prompts_of_any_length": prompts(5, 90, 1, 32),
    "a_long_prompt": prompts(300, **ONE_KV_HEAD),
    "many_rows_in_a_tile": prompts(100, 65, 49, heads=1, kv_heads=1, head_dim=16),
    "a_request_without_tokens": prompts(7, 0, 20),
    # the last token before a chunk is one short of a page or of a tile, at its end, or one past it
    **{
        f"chunks_behind_{n}": Case([n + 20, n + 33, n + 1], [20, 33, 1], **ONE_KV_HEAD)
        for n in (0, 1, 15, 16, 17, 63, 64, 65, 128)
    },
    **{
        f"chunks_of_{n}": Case([100 + n, 7 + n, n, 300], [n, n, n, 1], **ONE_KV_HEAD)
        for n in (8, 9, 31, 32, 33, 64, 65)
    },
    "a_last_token_of_many_chunks": Case([40, 65], [3, 1]),
    "a_chunk_with_drafts": Case([40, 70, 33, 200, 530], [4, 3, 2, 60, 1]),
    "only_drafts": Case([40, 70, 530], [5, 8, 1]),
    "a_chunk_alone": Case([90], [70]),
    "a_chunk_with_nothing_new": Case([40, 70, 33], [0, 50, 0]),
    "prompts_and_decodes": Case([20, 70, 33, 1, 600], [20, 1, 33, 1, 1]),
    "all_kinds": Case([130, 33, 200, 64, 9], [100, 1, 2, 64, 5]),
    "a_long_chunk_late": Case([700], [90], **ONE_KV_HEAD),
    **{f"decodes_gqa_{n}": decodes(40, 17, heads=2 * n, kv_heads=2) for n in (1, 3, 8)},
    **{f"prompts_gqa_{n}": prompts(20, 17, heads=2 * n, kv_heads=2) for n in (3, 8)},
    **{f"decodes_of_heads_of_{n}": decodes(40, 17, head_dim=n) for n in (80, 256)},
    **{f"prompts_of_heads_of_{n}": prompts(20, 17, head_dim=n) for n in (80, 256)},
    **{f"decodes_in_pages_of_{n}": decodes(1, 63, 64, 65, 150, page_size=n) for n in (1, 5, 64)},
    "splits_in_pages_of_64": decodes(700, 1, 257, page_size=64, window=600),
    **{f"prompts_in_pages_of_{n}": prompts(1, 63, 65, page_size=n) for n in (1, 5, 64)},
    **{f"mixture_in_pages_of_{n}": Case([64, 63, 129, 200], [30, 63, 65, 1], page_size=n) for n in (1, 64)},
    **{f"mixture_gqa_{n}": Case([90, 40, 33], [50, 1, 33], heads=2 * n, kv_heads=2) for n in (1, 3, 7, 8)},
    "mixture_of_many_heads": Case([90, 40], [50, 1], heads=40, kv_heads=1),
    **{f"mixture_of_heads_of_{n}": Case([90, 40, 33], [50, 1, 33], head_dim=n) for n in (80, 96, 128, 256)},
    **{f"decodes_window_{n}": decodes(1, 7, 33, 150, 600, window=n, **ONE_KV_HEAD) for n in (1, 40, 520, 4096)},
    **{f"prompts_window_{n}": prompts(1, 7, 33, 150, window=n, **ONE_KV_HEAD) for n in (1, 5, 4096)},
    **{
        f"mixture_window_{n}": Case([100, 33, 700, 90], [40, 33, 1, 5], window=n)
        for n in (1, 5, 16, 33, 40, 64, 100, 4096)
    },
    "another_scale": decodes(50, 3, scale=0.37),
    "another_scale_for_prompts": prompts(50, 3, scale=0.37),
}
