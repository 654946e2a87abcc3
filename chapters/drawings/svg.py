"""Drawing: an SVG in the book's colours, light or dark as the reader's browser is."""

from html import escape

WIDTH = 640  # at this width a text of 14 is still read on a phone
PALETTE = {  # name: in light, in dark
    "card": ("#ffffff", "#161b22"),
    "ink": ("#112233", "#e6edf3"),
    "soft": ("#50606e", "#a3b1be"),
    "line": ("#b9c5ce", "#46525e"),
    "faint": ("#edf2f5", "#232c36"),
    "blue": ("#1d6996", "#6db3dd"),
    "pale": ("#cfe0ea", "#2c4a60"),
    "green": ("#2e8b57", "#63c78d"),
    "red": ("#c0392b", "#f07a6c"),
    "amber": ("#b36b00", "#e6b450"),
    "violet": ("#74489c", "#b08ede"),
    "on": ("#ffffff", "#0d1117"),  # a text on blue, green, red or amber
}


class Drawing:
    """Shapes from the top left, in the order in which they are added. Colours are names of the palette."""

    def __init__(self, height: int, label: str, width: int = WIDTH) -> None:
        self.width, self.height, self.label = width, height, label
        self._used: set[tuple[str, str]] = set()  # (fill or stroke, colour)
        self._shapes: list[str] = []
        self.rect(0, 0, width, height, "card", radius=10)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "", radius: float = 2
    ) -> None:
        looks = self._looks(fill=fill, stroke=stroke)
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{looks}/>')

    def text(
        self, x: float, y: float, words: str, color: str = "ink", size: float = 15, anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        style = ' font-weight="bold"' * bold + ' font-family="Menlo, Consolas, monospace"' * mono
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{style}'
            f"{self._looks(fill=color)}>{escape(words)}</text>"
        )

    def path(self, d: str, stroke: str = "soft", fill: str = "", width: float = 1.5, dashed: bool = False) -> None:
        style = f'stroke-width="{width:g}"' + ' stroke-dasharray="4 4"' * dashed
        self._shapes.append(f'<path d="{d}" {style}{self._looks(fill=fill or "none", stroke=stroke)}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = "soft") -> None:
        """A vertical or horizontal line with a head."""
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        self.path(f"M{x1:g} {y1:g} L{x2 - 6 * dx:g} {y2 - 6 * dy:g}", color)
        left, right = (x2 - 8 * dx + 4 * dy, y2 - 8 * dy + 4 * dx), (x2 - 8 * dx - 4 * dy, y2 - 8 * dy - 4 * dx)
        head = f"M{x2:g} {y2:g} L{left[0]:g} {left[1]:g} L{right[0]:g} {right[1]:g} z"
        self.path(head, stroke="", fill=color)

    def cell(
        self, x: float, y: float, width: float, height: float, words: str, fill: str, color: str = "ink",
        size: float = 14,
    ) -> None:  # fmt: skip
        """A box with a text in its middle."""
        self.rect(x, y, width, height, fill, radius=3)
        self.text(x + width / 2, y + height / 2 + 0.35 * size, words, color, size, "middle")

    def svg(self) -> str:
        width, height = self.width, self.height
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(self.label)}" font-family="Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, self._style(), *self._shapes, "</svg>\n"])

    def _looks(self, fill: str = "", stroke: str = "") -> str:
        names = []
        for what, color in (("fill", fill), ("stroke", stroke)):
            if color in PALETTE:
                self._used.add((what, color))
                names.append(f"{what[0]}-{color}")
        return ' fill="none"' * (fill == "none") + (f' class="{" ".join(names)}"' if names else "")

    def _style(self) -> str:
        light, dark = (
            "".join(f".{what[0]}-{color}{{{what}:{PALETTE[color][mode]}}}" for what, color in sorted(self._used))
            for mode in (0, 1)
        )
        return f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
