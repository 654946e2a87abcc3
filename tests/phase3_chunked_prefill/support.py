"""Running requests of known lengths, and what a step does to them."""

from collections.abc import Sequence

from phase0_request import Batch, Request, SamplingParams


def request(name: str, prompt: int, max_tokens: int = 4, computed: int = 0) -> Request:
    """A running request; with `computed == prompt` it has one output token, and so is a decode."""
    one = Request(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    one.admit(0)
    if computed:
        one.advance(0, computed)
        if computed == prompt:
            one.append(7, 0)
    return one


def lengths(batch: Batch) -> dict[str, int]:
    """The tokens of each request in a step."""
    return {piece.request.id: piece.length for piece in batch}


def run(batch: Batch, now: float) -> None:
    """Commit a step as an engine does. Every sampled token is a 9."""
    for piece in batch:
        one, completes = piece.request, piece.completes
        one.advance(piece.start, piece.length)
        if completes and len(one.output_tokens) < one.params.max_tokens:
            one.append(9, now)


def unfinished(requests: Sequence[Request]) -> list[Request]:
    return [one for one in requests if len(one.output_tokens) < one.params.max_tokens]
