"""A node of the radix tree is split, and duplicate pages are replaced: both from a real prefix cache."""

from collections.abc import Sequence
from itertools import count

from chapters.drawings.svg import Drawing
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase4_radix.lab.draw import counted
from phase4_radix.prefix_cache import PrefixCache
from phase4_radix.radix_tree import NodeView

PAGE_SIZE, LEFT = 2, 18
WORDS = {
    "A": "You are a helpful bot. What is a tree?",
    "B": "You are a helpful bot. Why do we sleep?",
}
CELL, WIDE, PITCH = 82, 86, 76  # a page in the tree, a page of the pool, a row of the tree


class Chats:
    """A prefix cache, and requests with words as tokens."""

    def __init__(self, num_pages: int) -> None:
        self.cache = PrefixCache(num_pages, PAGE_SIZE)
        self.requests: dict[str, Request] = {}
        self._ids: dict[str, int] = {}
        self._next = count(1)

    def attach(self, name: str, text: str) -> Request:
        tokens = [self._ids.setdefault(word, next(self._next)) for word in text.split()]
        request = self.requests[name] = Request(name, tuple(tokens), SamplingParams(max_tokens=8))
        request.admit(0)
        if found := self.cache.attach(request):
            request.advance(0, found)
        return request

    def compute(self, name: str) -> None:
        request = self.requests[name]
        self.cache.grow(request, request.total)
        request.advance(request.computed, request.total - request.computed)

    def publish(self, name: str) -> None:
        self.cache.publish(self.requests[name])

    def words(self, tokens: Sequence[int]) -> list[str]:
        """The words of each page."""
        text = [next(word for word, id in self._ids.items() if id == token) for token in tokens]
        return [" ".join(text[at : at + PAGE_SIZE]) for at in range(0, len(text), PAGE_SIZE)]

    def tables(self, drawing: Drawing, x: float, y: float) -> None:
        """The page tables, one after the other. Blue: a page in the tree."""
        shared = {page for node in self.cache.tree.nodes() for page in node.pages}
        for name, request in self.requests.items():
            drawing.text(x, y + 16, f"table of {name}", "soft", 14)
            x += 78
            for page in self.cache.table(request):
                fill = "blue" if page in shared else "mint"
                drawing.cell(x, y, 26, 23, f"{page}", fill, "on" if page in shared else "ink")
                x += 29
            x += 22


def tree() -> Drawing:
    """A request is cached as one node; a second one diverges inside it."""
    chats = Chats(num_pages=8)
    drawing = Drawing(588, "A radix tree before and after a second request shares a prefix with the first")
    chats.attach("A", WORDS["A"])
    chats.compute("A")
    chats.publish("A")
    drawing.text(LEFT, 30, "A is running. Its full pages are one node.", bold=True)
    _draw_tree(drawing, chats, 44)
    chats.tables(drawing, LEFT, 124)
    chats.attach("B", WORDS["B"])
    drawing.text(LEFT, 190, "B begins alike. The node is split, and the upper part locked for B too.", bold=True)
    _draw_tree(drawing, chats, 204)
    chats.tables(drawing, LEFT, 284)
    chats.compute("B")
    chats.publish("B")
    drawing.text(LEFT, 350, "B has computed the rest. Its own full pages are a new child.", bold=True)
    _draw_tree(drawing, chats, 364)
    chats.tables(drawing, LEFT, 520)
    _legend(drawing, 572)
    return drawing


def _draw_tree(drawing: Drawing, chats: Chats, y: float) -> None:
    """The tree from left to right, without its root: every path is a prefix."""
    ends = {0: (LEFT + 12.0, y + 34)}  # by depth: where the last node of that depth ends
    drawing.rect(LEFT, y + 28, 12, 12, "soft", radius=6)
    row, before = 0, 0
    for node in chats.cache.tree.nodes():
        row += node.depth <= before
        before = node.depth
        x, above = ends[node.depth - 1]
        top, left = y + row * PITCH, x + 20
        middle = top + 34
        drawing.path(f"M{x:g} {above:g} C{x + 14:g} {above:g} {left - 14:g} {middle:g} {left:g} {middle:g}")
        ends[node.depth] = _draw_node(drawing, chats, node, left, top), middle


def _draw_node(drawing: Drawing, chats: Chats, node: NodeView, x: float, y: float) -> float:
    """A node with the words of its pages. Returns where it ends."""
    words = chats.words(node.tokens)
    drawing.rect(x, y, len(words) * CELL + 8, 68, "faint", "line", 6)
    locks = f"node {node.node}, {counted(node.ref_count, 'lock')}"
    drawing.text(x + 7, y + 15, locks, "soft", 13)
    for at, text in enumerate(words):
        drawing.cell(x + 6 + at * CELL, y + 21, CELL - 4, 27, text, "blue", "on")
        drawing.text(x + 4 + (at + 0.5) * CELL, y + 62, f"page {node.pages[at]}", "soft", 13, "middle")
    return x + len(words) * CELL + 8


def publish() -> Drawing:
    """Two requests compute one prefix at the same time. The second to publish gets the tree's pages for its own."""
    chats = Chats(num_pages=7)
    drawing = Drawing(464, "Two requests computed one prefix; the second to publish switches to the pages of the first")
    texts = {"A": "You are a helpful bot.", "B": "You are a helpful cat."}
    for name, text in texts.items():
        chats.attach(name, text)
    for name in texts:
        chats.compute(name)
    _draw_pool(drawing, chats, 30, 'A and B arrived together. Both have computed "You are a helpful".')
    chats.publish("A")
    _draw_pool(drawing, chats, 172, "A publishes: the tree holds its full pages.")
    chats.publish("B")
    _draw_pool(drawing, chats, 314, "B publishes: its table takes the pages of the tree, its own are freed.")
    _legend(drawing, 450)
    return drawing


def _draw_pool(drawing: Drawing, chats: Chats, y: float, title: str) -> None:
    """Every page with its words and its reference count, and the tables."""
    drawing.text(LEFT, y, title, bold=True)
    cache = chats.cache
    shared = {page for node in cache.tree.nodes() for page in node.pages}
    words: dict[int, str] = {}
    for request in chats.requests.values():
        table = cache.table(request)
        words |= dict(zip(table, chats.words(request.tokens(0, request.total)), strict=False))
    for page in range(cache.allocator.num_pages):
        x, references = LEFT + page * WIDE, cache.allocator.count(page)
        fill, color = ("blue", "on") if page in shared else ("mint", "ink") if references else ("faint", "soft")
        drawing.cell(x, y + 12, WIDE - 4, 27, words.get(page, "free"), fill, color, 13)
        drawing.text(x + WIDE / 2 - 2, y + 54, f"page {page}", "soft", 13, "middle")
        drawing.text(x + WIDE / 2 - 2, y + 70, f"count {references}", "soft", 13, "middle")
    chats.tables(drawing, LEFT, y + 82)


def _legend(drawing: Drawing, y: float) -> None:
    for x, fill, words in ((LEFT, "blue", "in the tree, read-only"), (LEFT + 190, "mint", "one request's own")):
        drawing.rect(x, y - 12, 15, 13, fill)
        drawing.text(x + 21, y, words, "soft", 14)
