"""A packed batch: the slices of four requests as the ragged arrays that the model gets."""

from collections.abc import Sequence

from chapters.drawings.svg import Drawing
from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache

PAGE_SIZE = 4
WORK = {  # name: tokens of the prompt, computed before, computed in this step
    "A": (5, 0, 5),
    "B": (9, 4, 3),
    "C": (6, 6, 1),
    "D": (2, 2, 1),
}
KINDS = {"A": "prefill", "B": "chunk", "C": "decode", "D": "decode"}
FILLS = {"A": "blue", "B": "green", "C": "amber", "D": "red"}
LEFT, WIDE, HIGH = 136, 48, 27


def batch(cache: PagedCache) -> Batch:
    """The requests after earlier steps, and their slices of this one."""
    slices = []
    for number, (name, (prompt, before, length)) in enumerate(WORK.items()):
        request = Request(name, tuple(range(10 * number + 10, 10 * number + 10 + prompt)), SamplingParams())
        request.admit(0)
        cache.attach(request)
        cache.grow(request, before + length)
        if before:
            request.advance(0, before)
        if before == prompt:
            request.append(10 * number + 10 + prompt, 0)
        slices.append(Slice(request, before, length))
    return Batch(tuple(slices))


def packed() -> Drawing:
    """One row for each array, one column for each token."""
    from phase2_prefill_decode.step.packed import pack

    cache = PagedCache(8, PAGE_SIZE)
    pieces = batch(cache)
    host = pack(pieces, cache, width=4)
    owners = [piece.request.id for piece in pieces for _ in range(piece.length)]
    drawing = Drawing(372, "Four slices packed into ragged arrays: tokens, positions, slots, and their boundaries")
    x = LEFT
    for piece in pieces:
        name, width = piece.request.id, WIDE * piece.length
        words = f"{name}: {KINDS[name]}" if piece.length > 1 else name
        drawing.cell(x, 18, width - 4, HIGH, words, FILLS[name], "on")
        x += width
    rows = (("tokens", host.tokens), ("positions", host.positions), ("slots", host.slots))
    for row, (name, numbers) in enumerate(rows):
        _row(drawing, 62 + 34 * row, name, numbers, owners)
    y = 62 + 34 * 3 + 14
    drawing.text(14, y + 18, "cu_seqlens_q", "soft", 14)
    for start in host.cu_seqlens_q:
        drawing.text(LEFT + WIDE * start - 2, y + 18, f"{start}", "ink", 15, "middle", bold=True)
        drawing.path(f"M{LEFT + WIDE * start - 2} 52 V{y + 4}", "soft", width=1, dashed=True)
    y += 42
    drawing.text(14, y + 18, "last", "soft", 14)
    for row in host.last:
        drawing.cell(LEFT + WIDE * row, y, WIDE - 4, HIGH, f"{row}", FILLS[owners[row]], "on")
    y += 44
    for column, (piece, length) in enumerate(zip(pieces, host.seq_lens, strict=True)):
        name, left = piece.request.id, LEFT + 122 * column
        drawing.text(left, y + 18, f"{length}", FILLS[name], 15, bold=True)
        for at, page in enumerate(cache.table(piece.request)):
            drawing.cell(left + 32 * at, y + 34, 29, HIGH, f"{page}", FILLS[name], "on")
    drawing.text(14, y + 18, "seq_lens", "soft", 14)
    drawing.text(14, y + 52, "page tables", "soft", 14)
    words = "last: the rows that need logits. B has none: its chunk ends before its prompt does."
    drawing.text(14, y + 92, words, "soft", 14)
    return drawing


def _row(drawing: Drawing, y: float, name: str, numbers: Sequence[int], owners: Sequence[str]) -> None:
    drawing.text(14, y + 18, name, "soft", 14)
    for column, (number, owner) in enumerate(zip(numbers, owners, strict=True)):
        drawing.cell(LEFT + WIDE * column, y, WIDE - 4, HIGH, f"{number}", FILLS[owner], "on")
