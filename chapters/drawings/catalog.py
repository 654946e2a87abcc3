"""The drawings of what the engine's code does, by the names of their files. The other figures are drawn by hand."""

from collections.abc import Callable

from chapters.drawings.film import film
from chapters.drawings.lanes import lanes
from chapters.drawings.packed import packed
from chapters.drawings.phases import phases
from chapters.drawings.primer import programs, shapes, strides
from chapters.drawings.request_map import request_map
from chapters.drawings.rope import rope
from chapters.drawings.states import states
from chapters.drawings.svg import Drawing

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "engine.svg": film,
    "lanes.svg": lanes,
    "map.svg": request_map,
    "packed.svg": packed,
    "phases.svg": phases,
    "programs.svg": programs,
    "rope.svg": rope,
    "shapes.svg": shapes,
    "states.svg": states,
    "strides.svg": strides,
}
