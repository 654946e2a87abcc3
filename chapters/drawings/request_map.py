"""One chat request through the server, down three lanes: eight steps, of which four repeat for each token."""

from chapters.drawings.svg import Drawing

LABEL = (
    "Three lanes. In the HTTP process a request is read, becomes tokens and a message; the engine process queues it, "
    "then plans, computes on the device and commits, step after step; the HTTP process turns each token into text"
)
LANES = ("HTTP process", "text", 10, 142), ("engine process", "tokens", 160, 166), ("device", "arrays", 334, 136)
HTTP, ENGINE, DEVICE = 22, 196, 343  # where the boxes of a lane begin
WIDE, HIGH = 118, 50
BOXES = (
    ("1 read", "HTTP and JSON", HTTP, 100, "blue"),
    ("2 tokenize", "text to tokens", HTTP, 176, "blue"),
    ("3 send", "a message", HTTP, 252, "blue"),
    ("4 queue", "chapters 0, 5", ENGINE, 252, "blue"),
    ("5 plan", "chapters 3, 4, 5", ENGINE, 356, "violet"),
    ("6 compute", "chapter 2", ENGINE, 432, "violet"),
    ("decoder", "kernels", DEVICE, 432, "violet"),
    ("sampler", "next tokens", DEVICE, 508, "violet"),
    ("7 commit", "chapter 0", ENGINE, 508, "violet"),
    ("8 stream", "tokens to text", HTTP, 584, "green"),
)
PAGES = "aab.bbccaac.bbca"
COLORS = {"a": "blue", "b": "green", "c": "amber", ".": "line"}


def request_map() -> Drawing:
    drawing = Drawing(702, LABEL, width=480)
    for title, words, x, width in LANES:
        drawing.rect(x, 40, width, 616, "faint", radius=10)
        drawing.text(x + 10, 64, title, "ink", 16, bold=True)
        drawing.text(x + 10, 84, words, "soft", 14)
    drawing.path("M16 320 H464 V646 H16 z", "violet", dashed=True)
    for line, words in enumerate(("5 to 8 repeat", "for each token")):
        drawing.text(HTTP + 2, 346 + 19 * line, words, "violet", 15, bold=True)
    for title, words, x, y, color in BOXES:
        drawing.rect(x, y, WIDE, HIGH, "card", color, 8)
        drawing.text(x + WIDE / 2, y + 21, title, color, 16, "middle", bold=True)
        drawing.text(x + WIDE / 2, y + 41, words, "ink", 14, "middle")
    pages(drawing)
    http, engine, device = (x + WIDE / 2 for x in (HTTP, ENGINE, DEVICE))
    for y in (176, 252):
        drawing.arrow(http, y - 26, http, y)
    drawing.arrow(HTTP + WIDE - 8, 28, HTTP + WIDE - 8, 100)
    drawing.arrow(HTTP + WIDE, 277, ENGINE, 277)
    drawing.arrow(engine, 302, engine, 356)
    drawing.arrow(engine, 406, engine, 432, "violet")
    drawing.arrow(ENGINE + WIDE, 457, DEVICE, 457, "violet")
    drawing.arrow(device, 482, device, 508, "violet")
    drawing.arrow(DEVICE, 533, ENGINE + WIDE, 533, "violet")
    drawing.path(f"M{ENGINE} 533 H176 V381 H{ENGINE - 8}", "violet")
    drawing.arrow(ENGINE - 14, 381, ENGINE, 381, "violet")
    drawing.path(f"M{engine} 558 V609 H{HTTP + WIDE + 8}", "green")
    drawing.arrow(HTTP + WIDE + 14, 609, HTTP + WIDE, 609, "green")
    drawing.text(engine + 8, 606, "tokens", "green", 14)
    drawing.arrow(http, 634, http, 676, "green")
    drawing.text(HTTP + WIDE - 8, 22, "client", "soft", 15, "middle")
    drawing.text(http, 694, "client", "soft", 15, "middle")
    return drawing


def pages(drawing: Drawing) -> None:
    """The pages that the decoder reads and writes."""
    middle = DEVICE + WIDE / 2
    drawing.text(middle, 345, "KV pages", "ink", 16, "middle", bold=True)
    drawing.text(middle, 364, "chapter 1", "ink", 14, "middle")
    for number, owner in enumerate(PAGES):
        drawing.rect(DEVICE + 15 * (number % 8), 374 + 17 * (number // 8), 12, 14, COLORS[owner])
    drawing.arrow(middle - 8, 408, middle - 8, 432, "violet")
    drawing.arrow(middle + 8, 432, middle + 8, 408, "violet")
