"""The pages of the course in their order: the evening of each, how long it takes to read, what a reader writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CHAPTERS = Path(__file__).parent
WORDS_A_MINUTE = 200
_UNREAD = re.compile(
    r"^ *```.*?^ *```|<details>\n<summary>(?!What was measured).*?</details>|<!--.*?-->|\]\([^)]*\)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Page:
    """A page: its file, its evening (0 beyond the core), and the hours to write the exercises that `start` puts, which
    are estimates, in part I of a reader who did them all."""

    name: str
    title: str
    evening: int
    hours: float
    writes: str

    @property
    def path(self) -> Path:
        return CHAPTERS / f"{self.name}.md"

    @property
    def minutes(self) -> int:
        """The time to read its words, without listings and answers."""
        words = re.findall(r"\w\S*", _UNREAD.sub(" ", self.path.read_text("utf-8")))
        return round(len(words) / WORDS_A_MINUTE)


PAGES = (
    Page("00_request", "0: the life of a request", 1, 1.5, "what a step computes, and text that streams"),
    Page("01_kv_pool", "1: the paged KV pool", 2, 1.5, "the allocator, and reads through a page table"),
    Page("02_prefill_decode", "2: a forward pass over pages", 2, 2, "what a step costs, and a model that reads pages"),
    Page("02_first_kernel", "2: a first kernel", 3, 2.5, "eight small kernels, from a copy to attention over pages"),
    Page("02_kernels", "2: attention and its kernels", 4, 3, "the store kernel, and the decode kernel"),
    Page("02_sampling", "2: sampling", 5, 1, "the draw of a token"),
    Page("03_chunked_prefill", "3: chunked prefill", 5, 0.5, "where a prompt is cut"),
    Page("04_radix", "4: the radix prefix cache", 5, 1, "the walk down the tree, and the eviction queue"),
    Page("05_continuous", "5: continuous batching", 6, 2.5, "the plan of a step, how a request starts, and preemption"),
    Page("06_integration", "6: integration", 7, 2, "the engine's process, and the streaming route"),
    Page("06_public_server", "6: a public server", 0, 2, "tokens with their text, which request failed, the watchdog"),
    Page("07_fast", "7: fast", 0, 2, "what makes one step ahead possible"),
    Page("08_constrained", "8: constrained decoding", 0, 2.5, "masks, and a grammar that follows an output"),
    Page("09_fits_in_memory", "9: fits in memory", 0, 2, "numbers of 8 and 4 bits, and what files of them hide"),
    Page("10_models", "10: models", 0, 2.5, "the description of a family, experts, a layer with a state"),
    Page("11_speculation", "11: speculation", 0, 2, "drafts, which of them count, and how many pay"),
    Page("12_scale", "12: scale", 0, 1, "what a rank holds, and a sum over ranks"),
    Page("capstone", "Capstone", 0, 3, "a policy of your own"),
)


def part_one() -> list[str]:
    lines = ["", "| evening | page | minutes to read | hours to write | you write |", "|---|---|---|---|---|"]
    return lines + [f"| {each.evening} {_row(each)}" for each in PAGES if each.evening and each.path.exists()]


def part_two() -> list[str]:
    lines = ["", "| page | minutes to read | hours to write | you write |", "|---|---|---|---|"]
    return lines + [_row(each) for each in PAGES if not each.evening]


def _row(page: Page) -> str:
    return f"| [{page.title}]({page.name}.md) | {page.minutes} | {hours(page.hours)} | {page.writes} |"


def hours(hours: float) -> str:
    return f"{int(hours) or ''}{'½' if hours % 1 else ''}"
