"""Rotary embedding: how far two pairs of a head have turned at each position, and why only distances count."""

from chapters.drawings.svg import Drawing

RADIUS, LEFT, WIDE = 28, 150, 72
POSITIONS, THETA, HEAD_DIM = 7, 16.0, 4
SAME = ((2, 0), (6, 4))  # positions of a query and of a key


def rope() -> Drawing:
    """A row of dials for each pair, a column for each position; then a query and a key on one dial."""
    from phase2_prefill_decode.loading.config import RopeParameters
    from phase2_prefill_decode.rope import tables

    cos, sin = (each.tolist() for each in tables(RopeParameters(rope_theta=THETA), HEAD_DIM, POSITIONS))
    label = "Two pairs of a head turning with the position, and two queries that see a key two positions before them"
    drawing = Drawing(290, label)
    drawing.text(14, 28, "position", "soft", 14)
    for position in range(POSITIONS):
        drawing.text(LEFT + WIDE * position, 28, f"{position}", "ink", 15, "middle", bold=True)
    for pair, color in enumerate(("blue", "green")):
        y = 74 + 76 * pair
        drawing.text(14, y - 4, f"pair {pair}", color, 15, bold=True)
        drawing.text(14, y + 16, ("fast", "four times slower")[pair], "soft", 13)
        for position in range(POSITIONS):
            _dial(drawing, LEFT + WIDE * position, y, [(cos[position][pair], sin[position][pair], color)])
    y = 236
    drawing.text(14, y - 4, "pair 0", "blue", 15, bold=True)
    drawing.text(14, y + 16, "query and key", "soft", 13)
    for column, (query, key) in enumerate(SAME):
        x = LEFT + 250 * column
        _dial(drawing, x, y, [(cos[at][0], sin[at][0], color) for at, color in ((query, "red"), (key, "amber"))])
        drawing.text(x + 42, y - 6, f"query at {query}", "red", 14)
        drawing.text(x + 42, y + 14, f"key at {key}", "amber", 14)
    drawing.text(LEFT + 140, y + 4, "same angle", "soft", 14)
    return drawing


def _dial(drawing: Drawing, x: float, y: float, hands: list[tuple[float, float, str]]) -> None:
    r = RADIUS
    drawing.path(f"M{x - r} {y} a{r} {r} 0 1 0 {2 * r} 0 a{r} {r} 0 1 0 {-2 * r} 0", "line", "faint")
    for cos, sin, color in hands:
        end = f"{x + 0.85 * r * cos:.1f} {y - 0.85 * r * sin:.1f}"
        drawing.path(f"M{x} {y} L{end}", color, width=3)
