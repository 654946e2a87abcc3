"""The score matrix of a prompt that is computed in chunks, cut where the real budget cuts it."""

from chapters.drawings.svg import Drawing
from phase3_chunked_prefill.budget import cut

PROMPT, CHUNK, PAGE_SIZE = 14, 6, 4
LEFT, TOP, CELL = 150, 68, 29
FILLS = ("blue", "green", "amber", "red")  # of the slices, one after the other


def slices() -> list[tuple[int, int]]:
    """(start, length) of the chunks of the prompt, then of a decode."""
    found, start = [], 0
    while start < PROMPT:
        found.append((start, cut(start, PROMPT - start, CHUNK, PAGE_SIZE)))
        start += found[-1][1]
    return [*found, (PROMPT, 1)]


def scores() -> Drawing:
    """Every query against every key: a slice is a band of rows, and sees the keys up to its own."""
    total, pieces = PROMPT + 1, slices()
    drawing = Drawing(TOP + CELL * total + 72, "The score matrix of a prompt computed in chunks, then of a decode")
    drawing.text(LEFT, 28, "keys: positions in the sequence, in pages of 4", bold=True)
    for key in range(total):
        drawing.text(LEFT + CELL * key + CELL / 2, 56, f"{key}", "soft", 13, "middle")
    for (start, length), color in zip(pieces, FILLS, strict=True):
        top, high = TOP + CELL * start, CELL * length
        name = "decode" if length == 1 else f"chunk of {length}"
        drawing.rect(14, top + 1, LEFT - 42, high - 2, color, radius=3)
        drawing.text(14 + (LEFT - 42) / 2, top + high / 2 + 5, name, "on", 14, "middle")
        for query in range(start, start + length):
            drawing.text(LEFT - 8, TOP + CELL * query + 19, f"{query}", "soft", 13, "end")
            for key in range(total):
                fill = "faint" if key > query else color if key >= start else "pale"
                drawing.rect(LEFT + CELL * key, TOP + CELL * query, CELL - 2, CELL - 2, fill)
    for page in range(0, total + 1, PAGE_SIZE):
        x = LEFT + CELL * page - 1
        drawing.path(f"M{x} 40 V{TOP + CELL * total}", "soft", width=1, dashed=True)
    y = TOP + CELL * total + 26
    drawing.rect(LEFT, y - 12, 15, 13, "pale")
    drawing.text(LEFT + 21, y, "keys of earlier slices, read from their pages", "soft", 14)
    drawing.rect(LEFT, y + 10, 15, 13, "blue")
    drawing.text(LEFT + 21, y + 22, "keys of this slice", "soft", 14)
    drawing.rect(LEFT + 190, y + 10, 15, 13, "faint")
    drawing.text(LEFT + 211, y + 22, "still ahead: masked", "soft", 14)
    return drawing
