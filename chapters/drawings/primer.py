"""Pictures of the Triton primer, from programs that Triton's interpreter ran: `watch` has their variables."""

from typing import Any

from chapters.drawings.svg import Drawing

COLORS = "blue", "green", "amber"
CELL, HIGH = 42, 28


def watched(name: str, *arguments: Any) -> list[dict[str, Any]]:
    """The variables of each program of a kernel of the primer."""
    from phase1_kv_pool.kernels import prepare_triton
    from phase2_prefill_decode.lab.primer.watch import watch

    prepare_triton()
    from phase2_prefill_decode.lab.primer import puzzles

    return watch(lambda: getattr(puzzles, name)(*arguments))


def programs() -> Drawing:
    """Ten numbers, three programs: which each takes, and what its mask leaves out."""
    import torch

    x = torch.arange(1.0, 11.0)
    found = watched("scale", x, 10.0)
    drawing = Drawing(338, "Ten numbers in blocks of four: the offsets and the mask of each of three programs")
    left = 106
    drawing.text(14, 40, "x", "soft", 14)
    for at, number in enumerate(x.tolist()):
        drawing.cell(left + CELL * at, 22, CELL - 3, HIGH, f"{number:g}", COLORS[at // 4], "on")
    drawing.text(left + CELL * len(x) + 10, 41, "other data", "soft", 13)
    for number, program in enumerate(found):
        x0, y = left + CELL * int(program["at"][0]), 84 + 62 * number
        drawing.text(14, y + 20, f"p = {number}", COLORS[number], 14, bold=True)
        drawing.text(x0 - 10, y + 12, "at", "soft", 13, "end")
        drawing.text(x0 - 10, y + 38, "mask", "soft", 13, "end")
        for lane, (at, inside) in enumerate(zip(program["at"], program["mask"], strict=True)):
            fill, words = (COLORS[number], "on") if inside else ("faint", "soft")
            drawing.cell(x0 + CELL * lane, y - 6, CELL - 3, 24, f"{at}", fill, words)
            drawing.cell(x0 + CELL * lane, y + 20, CELL - 3, 24, f"{int(inside)}", "faint", "ink" if inside else "red")
    y = 84 + 62 * len(found) + 14
    drawing.text(14, y + 12, "A program works on its whole block at once. Where the mask is 0 it neither", "soft", 14)
    drawing.text(14, y + 32, "reads nor writes: offsets 10 and 11 lie outside x.", "soft", 14)
    return drawing


def strides() -> Drawing:
    """A block of two dimensions: offsets from a column of rows and a line of columns."""
    import torch

    rows, width, stride = 3, 3, 5
    program = watched("masked_copy", torch.zeros(rows, stride)[:, :width], 2)[1]
    offsets = program["row"][:, None] * stride + program["column"]
    drawing = Drawing(330, "Offsets of a block of two rows and four columns, in rows that are five numbers apart")
    left = 40
    drawing.text(14, 30, "x in memory: 3 rows of 3 numbers, 5 apart; the offset of each number", "soft", 14)
    for at in range(rows * stride):
        used = at % stride < width
        fill = COLORS[at // stride] if used else "faint"
        drawing.cell(left + 37 * at, 42, 34, HIGH, f"{at}", fill, "on" if used else "soft", 13)
    drawing.text(14, 118, "program 1, blocks of 2 rows and 4 columns", "ink", 14, bold=True)
    top = 150
    drawing.text(14, top - 8, "row[:, None] * 5", "soft", 13)
    drawing.text(190, top - 8, "+  column", "soft", 13)
    drawing.text(430, top - 8, "=  offsets, and where the mask is 1", "soft", 13, "middle")
    for line, row in enumerate(program["row"]):
        y = top + 34 * line
        drawing.cell(24, y, CELL + 16, HIGH, f"{row} · 5", "pale")
        drawing.text(104, y + 19, "[2, 1]" if line == 0 else "", "soft", 13)
        for lane, column in enumerate(program["column"]):
            if line == 0:
                drawing.cell(176 + 32 * lane, y, 29, HIGH, f"{column}", "pale")
            inside = program["mask"][line, lane]
            fill, words = (COLORS[row], "on") if inside else ("faint", "soft")
            drawing.cell(340 + CELL * lane, y, CELL - 3, HIGH, f"{offsets[line, lane]}", fill, words)
    drawing.text(240, top + 52, "[4]", "soft", 13, "middle")
    drawing.text(536, top + 36, "[2, 4]", "soft", 13)
    drawing.text(14, top + 106, "A column [2, 1] and a line [4] broadcast to a block [2, 4], as in torch.", "soft", 14)
    drawing.text(14, top + 126, "Row 2 is the last, and a row has three numbers. Column 3 and row 3 are", "soft", 14)
    drawing.text(14, top + 146, "there only because a block's sizes are powers of two.", "soft", 14)
    return drawing


def shapes() -> Drawing:
    """The shapes of one turn of attention over a tile of keys."""
    drawing = Drawing(300, "Shapes in attention over a tile: scores from q and k, reduced by row, times values")
    unit = 2.9
    rows, dim, tile = 16 * unit, 32 * unit, 20 * unit
    y = 60

    def block(x: float, y: float, width: float, height: float, name: str, shape: str, fill: str) -> None:
        drawing.rect(x, y, width, height, fill)
        drawing.text(x + width / 2, y + height / 2 + 5, name, "on", 14, "middle", bold=True)
        drawing.text(x + width / 2, y + height + 16, shape, "soft", 12.5, "middle")

    block(20, y + 26, dim, rows, "q", "[rows, head_dim]", "blue")
    drawing.text(20 + dim + 12, y + 57, "·", "ink", 20, "middle", bold=True)
    block(20 + dim + 26, y, tile, dim, "trans(k)", "[head_dim, tile]", "green")
    drawing.text(20 + dim + tile + 40, y + 57, "=", "ink", 18, "middle")
    x = 20 + dim + tile + 56
    block(x, y + 26, tile, rows, "scores", "[rows, tile]", "amber")
    drawing.arrow(x + tile + 6, y + 50, x + tile + 40, y + 50)
    drawing.text(x + tile + 23, y + 40, "max, 1", "soft", 12, "middle")
    block(x + tile + 46, y + 26, 14, rows, "", "m_i [rows]", "violet")
    x2 = x + tile + 96
    block(x2, y + 26, tile, rows, "p", "[rows, tile]", "amber")
    drawing.text(x2 + tile + 10, y + 57, "·", "ink", 20, "middle", bold=True)
    block(x2 + tile + 22, y + 14, dim, tile, "v", "[tile, head_dim]", "green")
    drawing.text(14, 30, "One turn of the loop over keys: two products, a reduction along axis 1 between", "ink", 14)
    drawing.text(
        14, 222, "tl.dot(a, b, c) is a · b + c. Each size is a power of two, and at least 16 where", "soft", 14
    )
    drawing.text(14, 242, "tensor cores multiply. A reduction along axis 1 leaves one number for each row:", "soft", 14)
    drawing.text(
        14, 262, "m_i and l_i are [rows]. To meet a block again, they become a column: m_i[:, None].", "soft", 14
    )
    return drawing
