from collections.abc import Callable

from phase0_request import Batch, Request, Slice


def running(request: Request, computed: int, output: int = 0) -> Request:
    request.admit(0.0)
    for token in range(output):
        request.advance(request.computed, request.total - request.computed)
        request.append(token, 0.0)
    if computed < request.computed:
        request.preempt()
        request.admit(0.0)
    if computed > request.computed:
        request.advance(request.computed, computed - request.computed)
    return request


def kinds(piece: Slice) -> set[str]:
    names = ("completes", "is_prefill", "is_decode", "is_chunk")
    return {name for name in names if getattr(piece, name)}


def test_a_slice_is_a_prefill_a_decode_or_a_chunk_by_its_extent(make_request: Callable[..., Request]) -> None:
    fresh = running(make_request(prompt=8), computed=0)
    assert kinds(Slice(fresh, 0, 8)) == {"is_prefill", "completes"}
    assert kinds(Slice(fresh, 0, 5)) == {"is_prefill", "is_chunk"}
    assert kinds(Slice(fresh, 5, 3)) == {"is_prefill", "completes"}
    decoding = running(make_request(prompt=8), computed=9, output=2)
    assert kinds(Slice(decoding, 9, 1)) == {"is_decode", "completes"}


def test_one_prompt_token_is_a_prefill(make_request: Callable[..., Request]) -> None:
    assert kinds(Slice(running(make_request(prompt=1), 0), 0, 1)) == {"is_prefill", "completes"}
    last_of_a_cached_prompt = Slice(running(make_request(prompt=8), 7), 7, 1)
    assert kinds(last_of_a_cached_prompt) == {"is_prefill", "completes"}


def test_recomputing_output_tokens_after_a_preemption_is_a_prefill(make_request: Callable[..., Request]) -> None:
    preempted = running(make_request(prompt=4), computed=0, output=3)
    assert kinds(Slice(preempted, 0, 7)) == {"is_prefill", "completes"}
    assert kinds(Slice(preempted, 4, 1)) == {"is_prefill", "is_chunk"}


def test_a_batch_counts_its_tokens_by_kind(make_request: Callable[..., Request]) -> None:
    slices = (
        Slice(running(make_request(prompt=8), 9, 2), 9, 1),
        Slice(running(make_request(prompt=2), 2, 1), 2, 1),
        Slice(running(make_request(prompt=6), 0), 0, 4),
    )
    batch = Batch(slices)
    assert (len(batch), batch.num_tokens, batch.num_decode_tokens, batch.num_prefill_tokens) == (3, 6, 2, 4)
    assert tuple(batch) == slices
    assert not Batch()
