"""Every backend of paged attention at the edges, against torch's attention in float64 on contiguous keys."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phase1_kv_pool.layer import KVLayer
from tests.phase1_kv_pool.support import bits, every_backend, every_backend_and_dtype
from tests.phase2_prefill_decode.attention_cases import EDGES, TOLERANCE, Case, decodes, prompts
from tests.phase2_prefill_decode.backends import backend_of

KINDS = (
    "long_beside_short", "prompts_of_any_length", "all_kinds", "splits_in_pages_of_64", "mixture_window_40",
    "chunks_behind_16", "chunks_of_33", "a_chunk_with_drafts", "mixture_gqa_7", "mixture_of_heads_of_128",
)  # fmt: skip

IN_8_BITS = torch.int8, torch.float8_e4m3fn


def every_backend_and_case() -> list[Any]:
    """Parameters (backend, dtype, case). Triton is interpreted slowly: in float16 it runs one case of each kind."""
    return [
        pytest.param(*param.values, case, marks=param.marks, id=f"{param.id}-{name}")
        for param in every_backend_and_dtype()
        for name, case in EDGES.items()
        if param.values[:2] != ("triton", torch.float16) or name in KINDS
    ]


def check(backend: str, dtype: torch.dtype, case: Case, stored: torch.dtype | None = None) -> None:
    inputs = case.inputs(backend, dtype, stored)
    found = case.run(backend_of(backend).attend, inputs)
    case.assert_close(found, case.oracle(inputs), TOLERANCE[dtype])


@pytest.mark.parametrize(("backend", "dtype", "case"), every_backend_and_case())
def test_paged_attention_matches_contiguous_attention(backend: str, dtype: torch.dtype, case: Case) -> None:
    check(backend, dtype, case)


@pytest.mark.parametrize("name", [*KINDS, "decodes_of_heads_of_80", "mixture_of_heads_of_96", "decodes_in_pages_of_5"])
@pytest.mark.parametrize("stored", IN_8_BITS)
@pytest.mark.parametrize("backend", every_backend())
def test_keys_and_values_in_8_bits_are_scaled_by_token_and_head(backend: str, stored: torch.dtype, name: str) -> None:
    """The oracle computes in float64 with what is stored, so the result is as close as in the dtype of the queries."""
    check(backend, torch.float32, EDGES[name], stored)
    if backend != "triton":
        check(backend, torch.bfloat16, EDGES[name], stored)


@pytest.mark.parametrize("name", [*KINDS, "a_decode_over_many_splits", "a_request_without_tokens", "only_drafts"])
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_a_sink_takes_a_part_of_each_softmax_and_adds_no_value(backend: str, dtype: torch.dtype, name: str) -> None:
    """Once, however a sequence is split. From a sink that takes nothing to one that takes all."""
    case = EDGES[name]
    sinks = [(-90.0, 0.5, 3.0, -2.0, 90.0, 1.0, 0.0)[head % 7] for head in range(case.heads)]
    check(backend, dtype, replace(case, sinks=tuple(sinks)))
    if dtype == torch.float32:
        check(backend, dtype, replace(case, sinks=tuple(sinks)), torch.int8)


@pytest.mark.parametrize("backend", every_backend())
def test_a_padding_row_attends_to_a_sink_alone(backend: str) -> None:
    case = decodes(40, 33, sinks=(0.0, 1.0, -1.0, 2.0))
    inputs = case.inputs(backend, torch.float32)
    inputs.metadata.seq_lens[1], inputs.metadata.page_table[1] = 0, 2**31 - 1
    assert not case.run(backend_of(backend).attend, inputs)[1].any()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 140), min_size=1, max_size=5))
    kind = draw(st.sampled_from(["prompts", "decodes", "mixture"]))
    new = {
        "prompts": lambda: list(lengths),
        "decodes": lambda: [1] * len(lengths),
        "mixture": lambda: [draw(st.integers(0, length) | st.just(1)) for length in lengths],
    }[kind]()
    new[0] = max(new[0], 1)
    kv_heads = draw(st.integers(1, 3))
    return Case(
        lengths,
        new,
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 48, 64, 80])),
        page_size=draw(st.sampled_from([1, 2, 7, 16, 64])),
        window=draw(st.none() | st.integers(1, 150)),
    )


@pytest.mark.parametrize("backend", every_backend())
@settings(max_examples=30)
@given(case=cases(), stored=st.sampled_from([None, *IN_8_BITS]))
def test_random_batches_match_contiguous_attention(backend: str, case: Case, stored: torch.dtype | None) -> None:
    check(backend, torch.float32, case, stored)


@pytest.mark.parametrize(
    "case", [decodes(70, 600, spread=150.0), prompts(70, spread=150.0)], ids=["decodes", "prompts"]
)
@pytest.mark.parametrize("backend", every_backend())
def test_scores_of_hundreds_do_not_overflow(backend: str, case: Case) -> None:
    """exp(89) is infinite in float32. Rounding of a score of 300 moves its weight by 3e-5, hence the tolerance."""
    inputs = case.inputs(backend, torch.float32)
    assert (inputs.query.cpu()[:, 0] @ inputs.k[0][:, 0].T).max() * case.scaling > 89
    found = case.run(backend_of(backend).attend, inputs)
    case.assert_close(found, case.oracle(inputs), 1e-3)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # Triton's interpreter on a row of NaN
@pytest.mark.parametrize("side", ["query", "keys", "values", "key_scales", "value_scales"])
@pytest.mark.parametrize("case", [decodes(40, 600, 33), prompts(40, 70, 33)], ids=["decodes", "prompts"])
@pytest.mark.parametrize("backend", every_backend())
def test_a_nan_stays_in_its_request_and_stays_a_nan(backend: str, case: Case, side: str) -> None:
    """Tokens that attend to it get NaN, so that their request fails. No other request is affected."""
    inputs = case.inputs(backend, torch.float32, torch.int8 if "scales" in side else None)
    clean = case.run(backend_of(backend).attend, inputs)
    first, last = sum(case.new[:1]), sum(case.new[:2])
    if side == "query":
        inputs.query[last - 1] = torch.nan
    else:
        position = case.lengths[1] - 3
        getattr(inputs.kv, side)[inputs.tables[1][position // 16], :, position % 16] = torch.nan
    found = case.run(backend_of(backend).attend, inputs)
    hit = max(first, last - (1 if side == "query" else 3))
    assert found[hit:last].isnan().all(), f"a NaN among the {side} of sequence 1 is not in its result"
    others = torch.cat((found[:first], found[last:])), torch.cat((clean[:first], clean[last:]))
    assert torch.equal(*others), f"a NaN among the {side} of sequence 1 changes the result of another sequence"


@pytest.mark.parametrize("backend", every_backend())
def test_a_padding_row_of_no_tokens_is_zero(backend: str) -> None:
    """A captured batch is padded with rows of length 0, each with a query and no page of its own."""
    case = decodes(40, 33, 17)
    inputs = case.inputs(backend, torch.float32)
    wanted = case.oracle(inputs)
    inputs.metadata.seq_lens[1] = 0
    inputs.metadata.page_table[1] = 2**31 - 1
    found = case.run(backend_of(backend).attend, inputs)
    assert not found[1].any(), "sequence 1 has no tokens: its result must be 0"
    torch.testing.assert_close(found[::2].double(), wanted[::2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "stored"), [(None, None), (40, None), (None, torch.int8), (None, IN_8_BITS[1])])
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype())
def test_the_batch_does_not_change_a_bit(
    backend: str, dtype: torch.dtype, window: int | None, stored: torch.dtype | None
) -> None:
    """On a GPU a chunk of up to eight tokens may run on either kernel, depending on the rest of its step."""
    case = Case([90, 33, 120, 64, 300, 600], [60, 1, 30, 64, 1, 1], window=window)
    if backend != "triton":
        case = replace(case, new=[60, 1, 2, 64, 5, 1])
    inputs, attend = case.inputs(backend, dtype, stored), backend_of(backend).attend
    together = case.run(attend, inputs).split(case.new)
    for (one, alone), rows in zip(case.alone(inputs), together, strict=True):
        same = torch.equal(bits(one.run(attend, alone)), bits(rows))
        assert same, f"a sequence of {one.lengths[0]} tokens, {one.new[0]} of them new, has another result alone"


@pytest.mark.parametrize("backend", every_backend()[1:])
def test_mismatched_shapes_dtypes_and_strides_are_refused(backend: str) -> None:
    case = decodes(20, 3)
    inputs = case.inputs(backend, torch.float32)
    attend = backend_of(backend).attend
    query, (keys, values, *_), metadata = inputs.query, inputs.kv, inputs.metadata

    def attended(query: Tensor, *kv: Tensor) -> Tensor:
        return attend(query, KVLayer(*kv), metadata, 1.0, None, None)

    with pytest.raises(ValueError, match=r"multiple of KV heads .* got queries \[2, 3, 64\], keys \[\d+, 2, 16, 64\]"):
        attended(query[:, :3], keys, values)
    with pytest.raises(ValueError, match=r"all heads of one size, got queries \[2, 4, 32\]"):
        attended(query[..., :32], keys, values)
    with pytest.raises(ValueError, match=r"of one dtype, got torch.float16, torch.float32, torch.float32"):
        attended(query.half(), keys, values)
    with pytest.raises(ValueError, match=r"whole layers of a pool, contiguous"):
        attended(query, keys.transpose(1, 2).contiguous().transpose(1, 2), values)
    with pytest.raises(ValueError, match=r"whole layers of a pool, contiguous"):
        attended(query, keys, values.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"all heads of one size, got .* values \[\d+, 2, 16, 32\]"):
        attended(query, keys, values[..., :32])
    with pytest.raises(ValueError, match=r"keys and values in torch.int8 need scales \[\d+, 2, 16\]"):
        attended(query, keys.char(), values.char())
