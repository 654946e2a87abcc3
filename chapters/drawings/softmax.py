"""The online softmax over tiles of keys, and two splits that are joined: with the numbers of the lab's real code."""

import torch
from torch import Tensor

from chapters.drawings.svg import Drawing
from phase2_prefill_decode.lab.attention_tiles import LOWEST, accumulate, join

SCORES = torch.tensor([[1.0, 0.0, 3.0, 2.0, 4.0, 1.0, 2.0, 3.0]])  # one query, eight keys
VALUES = torch.tensor([[1.0], [2.0], [4.0], [3.0], [0.0], [2.0], [5.0], [1.0]])
TILE, SPLIT = 2, 4
LEFT, WIDE = 70, 68
COLORS = ("blue", "green")  # of the splits


def softmax() -> Drawing:
    """One query over eight keys, two at a time, in two splits."""
    drawing = Drawing(408, "The online softmax over tiles of keys, in two splits, and how the splits are joined")
    drawing.text(14, 66, "score", "soft", 14)
    drawing.text(14, 96, "value", "soft", 14)
    for key, (score, value) in enumerate(zip(SCORES[0].tolist(), VALUES[:, 0].tolist(), strict=True)):
        drawing.cell(LEFT + WIDE * key, 48, WIDE - 4, 26, f"{score:g}", COLORS[key // SPLIT], "on")
        drawing.cell(LEFT + WIDE * key, 78, WIDE - 4, 26, f"{value:g}", "faint")
    parts, lse = zip(*(_draw_split(drawing, number) for number in range(len(COLORS))), strict=True)
    joined = join(torch.stack(parts), torch.stack(lse)).item()
    weights = torch.exp2(SCORES - SCORES.max())
    whole = ((weights @ VALUES) / weights.sum()).item()
    drawing.rect(LEFT, 334, len(VALUES) * WIDE - 4, 58, "pale", radius=6)
    middle = LEFT + len(VALUES) * WIDE / 2 - 2
    drawing.text(middle, 358, f"joined, each weighted by 2^lse: {joined:.3f}", "ink", 15, "middle", bold=True)
    drawing.text(middle, 381, f"softmax of all eight scores at once (base 2): {whole:.3f}", "soft", 14, "middle")
    return drawing


def _draw_split(drawing: Drawing, number: int) -> tuple[Tensor, Tensor]:
    """The running state after each tile of a split. Returns the result of the split, and the log of its sum."""
    first, x, color = number * SPLIT, LEFT + WIDE * SPLIT * number, COLORS[number]
    drawing.text(x, 32, f"split {number}: keys {first} to {first + SPLIT - 1}", color, bold=True)
    m_i, l_i, acc = torch.full((1,), LOWEST), torch.zeros(1), torch.zeros(1, 1)
    for tile in range(first, first + SPLIT, TILE):
        before, keys = m_i, slice(tile, tile + TILE)
        m_i, l_i, acc = accumulate(SCORES[:, keys], VALUES[keys], m_i, l_i, acc)
        at, alpha = LEFT + WIDE * tile, torch.exp2(before - m_i).item()
        drawing.arrow(at + WIDE - 2, 108, at + WIDE - 2, 134)
        drawing.rect(at, 136, 2 * WIDE - 4, 112, "faint", "line", 6)
        for line, (name, value) in enumerate({"m_i": m_i, "l_i": l_i, "acc": acc}.items()):
            drawing.text(at + 10, 160 + 24 * line, name, "soft", 14)
            drawing.text(at + 2 * WIDE - 14, 160 + 24 * line, f"{value.item():g}", "ink", 14, "end")
        if tile == first:
            drawing.text(at + 10, 236, "first tile", "soft", 14)
        else:
            drawing.text(at + 10, 236, f"alpha = {alpha:g}", "red" if alpha < 1 else "soft", 14)
    part, lse = acc / l_i, m_i + l_i.log2()
    middle = x + 3 * WIDE - 2
    drawing.arrow(middle, 250, middle, 274)
    words = f"acc / l_i = {part.item():.3f}, lse = {lse.item():.2f}"
    drawing.cell(x, 276, SPLIT * WIDE - 4, 30, words, color, "on")
    drawing.arrow(middle, 308, middle, 332)
    return part, lse
