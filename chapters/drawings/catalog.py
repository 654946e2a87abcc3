"""Every drawing of the book, by the name of its file."""

from collections.abc import Callable

from chapters.drawings.film import film
from chapters.drawings.lanes import lanes
from chapters.drawings.packed import packed
from chapters.drawings.request_map import request_map
from chapters.drawings.scores import scores
from chapters.drawings.softmax import softmax
from chapters.drawings.svg import Drawing
from chapters.drawings.tree import publish, tree

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "engine.svg": film,
    "lanes.svg": lanes,
    "map.svg": request_map,
    "packed.svg": packed,
    "publish.svg": publish,
    "radix.svg": tree,
    "scores.svg": scores,
    "softmax.svg": softmax,
}
