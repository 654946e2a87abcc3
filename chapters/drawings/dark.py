"""Gives an SVG that was drawn in light colours its dark ones, as rules that a browser applies in dark mode."""

import re

SURFACES = {"#ffffff": "#161b22", "#fff": "#161b22", "#f2f6f8": "#232c36", "#e6ebef": "#2f3943", "#0b3c5d": "#1b5780"}
INKS = {
    "#123": "#e6edf3", "#334": "#e6edf3", "#445": "#c5d0da", "#556": "#a3b1be", "#667": "#a3b1be",
    "#9ab": "#46525e", "#cfd8de": "#46525e", "#c0392b": "#f07a6c",
}  # fmt: skip
CHARTS = {
    "#ffffff": "#161b22", "#1d6996": "#6db3dd", "#c0392b": "#f07a6c", "#2e8b57": "#63c78d", "#b36b00": "#e6b450",
    "#667788": "#a3b1be", "#34495e": "#c5d0da", "#e3e8ec": "#2f3943", "#d5dbe0": "#46525e",
}  # fmt: skip


def with_dark_mode(svg: str) -> str:
    """Add a style for dark mode. Colours may be attributes, or in `style`, where matplotlib writes them."""
    rules = [f'rect[fill="{light}"]{{fill:{dark}}}' for light, dark in SURFACES.items() if f'fill="{light}"' in svg]
    for light, dark in INKS.items():
        rules += [f'[{what}="{light}"]{{{what}:{dark}}}' for what in ("fill", "stroke") if f'{what}="{light}"' in svg]
    for light, dark in CHARTS.items():
        for what in ("fill", "stroke"):
            if f"{what}: {light}" in svg:
                rules.append(f'[style*="{what}: {light}"]{{{what}:{dark}!important}}')
    rules += ["text{fill:#e6edf3}"] * ("matplotlib" in svg)  # it writes no colour for black
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    return re.sub(r"<svg\b[^>]*>", lambda opening: f"{opening[0]}\n{style}", svg, count=1)
