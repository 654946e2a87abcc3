"""The demo: what its scenes show, and that its command runs to the end."""

import re
import subprocess
import sys

import pytest

from phase4_radix.lab import demo
from phase4_radix.lab.scenes import SCENES
from phase4_radix.lab.world import Setting, World, play

DEMO = [sys.executable, "-m", "phase4_radix"]


def test_every_scene_shows_what_its_caption_says() -> None:
    world = World(Setting())
    seen: dict[str, list[tuple[int, ...]]] = {scene.caption: [] for scene in SCENES}
    splits = [0]
    original = world.cache.tree._split
    world.cache.tree._split = lambda *given: (splits.append(1), original(*given))[1]  # type: ignore[method-assign]
    for scene in play(world):
        world.cache.check()
        counts = world.cache.counts
        seen[scene.caption].append((counts.hit_tokens, counts.duplicates, counts.evictions, sum(splits)))
    ends = [moments[-1] for moments in seen.values()]
    gains = [
        tuple(b - a for a, b in zip(before, after, strict=True))
        for before, after in zip([(0,) * 4, *ends[:-1]], ends, strict=True)
    ]
    hits, duplicates, evictions, split = zip(*gains, strict=True)
    assert hits[0] == 0 < hits[1]
    assert split[0] == 0 < split[1]
    assert hits[2] > 30  # prompt and answer, far more than the instruction
    assert duplicates[:3] == (0,) * 3
    assert duplicates[3] >= 4  # two of three computed the question for nothing
    assert hits[4] == 0
    assert evictions[:5] == (0,) * 5
    assert evictions[5] > 0
    assert hits[6] >= 12
    assert world.cache.usage.referenced == 0


@pytest.mark.parametrize(("pages", "page_size"), [(32, 4), (128, 1), (8, 16)])
def test_the_smallest_caches_play_to_the_end(pages: int, page_size: int) -> None:
    world = World(Setting(pages=pages, page_size=page_size))
    assert len({scene.caption for scene in play(world)}) == len(SCENES)
    assert world.cache.usage.referenced == 0


def test_news_are_the_changes_since_the_mark() -> None:
    """The new pages of a prompt without a cached prefix include those that held other tokens before."""
    world = World(Setting(pages=32))
    for number, prompt in enumerate(("a desert " * 30, "some gravity " * 30, "the rainbow " * 30)):
        world.mark()
        evictions = world.cache.counts.evictions
        request = world.say(prompt)
        while not (world.running and not world.running[0].answer):
            world.step()
        pages = world.cache.tree.match(request.tokens(0, request.total)).pages
        assert world.fresh == set(pages)
        evicted = world.cache.counts.evictions - evictions
        assert (f"{len(pages)} pages new" in world.news, f"{evicted} pages evicted" in world.news) == (True, number > 0)
        world.finish(world.running[0])
    world.mark()
    assert (world.news, world.fresh) == ([], set())


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--pages=31"])
    assert "pages must be at least 32 of 4 tokens, to hold the longest conversation; got 31" in capsys.readouterr().err


def test_piped_the_command_prints_one_picture_per_scene_without_waiting() -> None:
    command = [*DEMO, "--steps-per-second", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert all(scene.caption[:60] in done.stdout for scene in SCENES)
    new = [int(number) for number in re.findall(r"(\d+) pages new", done.stdout)]
    assert len(new) == len(SCENES)
    assert new[-1] < new[0]  # its own, not all since the first


def test_typed_prompts_are_served_and_keep_their_pages() -> None:
    typed = "What is a desert?\n@tenant What is a desert?\nWhat is a desert? And\n\n" + "many words " * 300 + "\n"
    typed += "\n".join(f"{word} " * 40 + "?" for word in ("one", "two", "three", "four", "five")) + "\n"
    done = subprocess.run([*DEMO, "--type"], input=typed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[tenant] What is a desert? A desert is" in done.stdout
    assert re.search(r"^r3 has \d tokens, 4 of them cached\.", done.stdout, re.MULTILINE)
    assert "The oldest request has finished." in done.stdout
    assert re.search(r"\d+ tokens and their answer do not fit into 240", done.stdout)
    assert "It waits for free pages" in done.stdout
