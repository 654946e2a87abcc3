"""One chat request through the two processes of the server: eight steps, of which four repeat for each token."""

from chapters.drawings.svg import Drawing

LABEL = (
    "A request is read, becomes tokens and a message in the HTTP process; the engine process queues it, then plans, "
    "computes and commits, step after step; the HTTP process turns each token into text"
)
ABOVE = ("1 read", "HTTP and JSON", 32), ("2 tokenize", "text to tokens", 182), ("3 send", "a message", 332)
LOOP = ("5 plan", "chapters 3, 4, 5", 32), ("6 compute", "chapter 2", 240), ("7 commit", "chapter 0", 448)
PAGES = "aab.bbcc.aac..bb.cc.a..."
COLORS = {"a": "blue", "b": "green", "c": "amber", ".": "faint"}


def request_map() -> Drawing:
    drawing = Drawing(462, LABEL)
    for words, x, y in (("client", 95, 26), ("client", 545, 26)):
        drawing.text(x, y, words, "soft", anchor="middle")
    drawing.arrow(95, 34, 95, 84)
    drawing.arrow(545, 84, 545, 34, "green")
    part(drawing, "HTTP process", "text: chapter 6", 48, 112)
    part(drawing, "engine process", "tokens", 196, 250)
    for title, words, x in ABOVE:
        box(drawing, title, words, x, 84, 126)
    box(drawing, "8 stream", "tokens to text", 482, 84, 126, "green")
    drawing.arrow(158, 111, 182, 111)
    drawing.arrow(308, 111, 332, 111)
    box(drawing, "4 queue", "chapters 0, 5", 32, 232, 160)
    drawing.path("M395 138 L395 259 L200 259")
    drawing.arrow(206, 259, 192, 259)
    drawing.arrow(112, 286, 112, 316)
    for title, words, x in LOOP:
        box(drawing, title, words, x, 316, 160, "violet")
    drawing.arrow(192, 343, 240, 343, "violet")
    drawing.arrow(400, 343, 448, 343, "violet")
    drawing.arrow(545, 316, 545, 138, "green")
    drawing.text(552, 180, "a token", "green", 14)
    drawing.path("M528 370 L528 394 L112 394 L112 384", "violet")
    drawing.arrow(112, 394, 112, 370, "violet")
    drawing.text(320, 388, "every step", "violet", 14, "middle")
    drawing.text(32, 429, "KV pages: chapter 1", "ink", 14)
    for number, owner in enumerate(PAGES):
        drawing.rect(200 + 17 * number, 416, 14, 16, COLORS[owner])
    return drawing


def part(drawing: Drawing, title: str, words: str, y: float, height: float) -> None:
    drawing.rect(16, y, 608, height, "none", "line", 10)
    drawing.text(176, y + 24, title, "ink", 15, bold=True)
    drawing.text(304, y + 24, words, "soft", 14)


def box(drawing: Drawing, title: str, words: str, x: float, y: float, width: float, color: str = "blue") -> None:
    drawing.rect(x, y, width, 54, "card", color, 8)
    drawing.text(x + width / 2, y + 23, title, color, 16, "middle", bold=True)
    drawing.text(x + width / 2, y + 43, words, "ink", 14, "middle")
