import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from phase4_radix.lab import view
from phase4_radix.lab.scenes import SCENES
from phase4_radix.lab.world import Setting, World, play
from tests.terminal import after_the_view, on_a_terminal

DEMO = [sys.executable, "-m", "phase4_radix"]


def drawn(world: World, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as captured:
        console.print(view.picture(world, "a caption"))
    return captured.get()


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
    found, duplicates, evictions, parted = zip(*gains, strict=True)
    assert found[0] == 0 < found[1]
    assert parted[0] == 0 < parted[1]
    assert found[2] > 30  # prompt and answer, far more than the instruction
    assert duplicates[:3] == (0,) * 3
    assert duplicates[3] >= 4  # two of three computed the question for nothing
    assert found[4] == 0
    assert evictions[:5] == (0,) * 5
    assert evictions[5] > 0
    assert found[6] >= 12
    assert world.cache.usage.referenced == 0


def test_the_picture_shows_pages_locks_and_tokens() -> None:
    world = World(Setting())
    first = world.say("What is a desert?", " It is dry.")
    world.step()
    lines = drawn(world).splitlines()
    assert lines[1] == "pages " + "\u2588" * 2 + "\u00b7" * 58
    assert lines[2].startswith("\u2588 2 in use  \u2592 0 kept  \u00b7 58 free  1 running  0 waiting  found 0/5 (0%)")
    assert lines[3] == "1 node more, 1 page new"
    assert re.fullmatch(r"└── page 0 1 lock What is a desert *", lines[5])
    while world.running[0].answer:
        world.step()
    world.finish(world.running[0])
    assert first.finished
    assert "lock " not in drawn(world)
    assert "\u2592\u2592\u00b7" in drawn(world)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_picture_is_no_wider_than_its_terminal(width: int) -> None:
    world = World(Setting())
    for number, _ in enumerate(play(world)):
        if number % 20 == 0:
            assert max(map(len, drawn(world, width).splitlines())) <= width


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--pages=31", "pages must be at least 32 of 4 tokens, to hold the longest talk; got 31"),
        ("--page-size=0", "page-size must be at least 1, got 0"),
        ("--steps-per-second=nan", "steps-per-second must be above 0 and finite, got nan"),
        ("--pages=many", "invalid int value: 'many'"),
    ],
)
def test_bad_options_are_named(option: str, words: str) -> None:
    done = subprocess.run([*DEMO, option], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_smallest_memory_and_a_page_of_one_token_play_to_the_end() -> None:
    for setting in (Setting(pages=32), Setting(pages=128, page_size=1), Setting(pages=8, page_size=16)):
        world = World(setting)
        captions = {scene.caption for scene in play(world)}
        assert len(captions) == len(SCENES)
        assert world.cache.usage.referenced == 0


def test_the_command_prints_a_picture_a_scene_when_piped() -> None:
    """And waits for nothing: at this rate a terminal would show it for an hour."""
    command = [*DEMO, "--steps-per-second", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    for scene in SCENES:
        assert scene.caption[:60] in done.stdout
    assert sum(line.startswith("pages ") for line in lines) == len(SCENES)
    assert re.fullmatch(r" +\d+ +\d+ +\d+ +\d\d% +[1-9]\d* +[1-9]\d* +\d+", lines[-1].rstrip())


def test_prompts_can_be_typed() -> None:
    typed = "What is a desert?\n@tenant What is a desert?\nWhat is a desert? And\n\n" + "many words " * 300 + "\n"
    done = subprocess.run([*DEMO, "--type"], input=typed, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[tenant] What is a desert? A desert is" in done.stdout
    assert re.search(r"^r3 has \d tokens, 4 of them there already\.", done.stdout, re.MULTILINE)
    assert "The oldest has finished." in done.stdout
    assert re.search(r"\d+ tokens and the answer to them do not fit; 240 do", done.stdout)


def test_a_picture_tells_what_its_line_did() -> None:
    """Not what the last of its steps did, which is nothing."""
    lines = ["Be brief. What is a desert?", "Be brief. What is a comet?", ""]
    done = subprocess.run([*DEMO, "--type"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60)
    news = re.findall(r"^\d+ node.*new.*|^the tree stays.*", done.stdout, re.MULTILINE)
    assert len(news) == 3
    assert re.fullmatch(r"1 node more, \d+ pages new", news[0].rstrip())
    assert re.fullmatch(r"2 nodes more, \d+ pages new", news[1].rstrip())  # its own, and one where the run is split
    assert news[2].startswith("the tree stays as it is")


def test_what_is_new_is_told_from_the_mark() -> None:
    """Of a prompt that nothing begins like: its own pages, also those that held another's tokens before."""
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


def test_a_scene_that_is_printed_says_what_it_did() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    assert "the tree stays as it is" not in done.stdout
    assert sum(bool(re.match(r"\d+ nodes? (more|fewer)|\d+ pages? new", line)) for line in lines) == len(SCENES)
    new = [int(number) for number in re.findall(r"(\d+) pages new", done.stdout)]
    assert len(new) == len(SCENES)
    assert new[-1] < new[0]  # its own, not all since the first
    assert sum(line.startswith("\u2588 ") and "found" in line for line in lines) == len(SCENES)  # in one line


def test_who_types_too_much_is_told_to_wait() -> None:
    lines = [f"{word} " * 40 + "?" for word in ("one", "two", "three", "four", "five")]
    done = subprocess.run(
        [*DEMO, "--type", "--pages", "32"], input="\n".join(lines), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "It waits for room" in done.stdout


def test_ctrl_c_in_the_middle_leaves_a_clean_terminal() -> None:
    status, seen = on_a_terminal(*DEMO, until=b"running")
    assert status == 130
    assert re.search(rb"Stopped at step \d+\.\r\n$", after_the_view(seen))
    assert b"Traceback" not in seen


def test_a_run_on_a_terminal_ends_by_itself_with_the_figures() -> None:
    status, seen = on_a_terminal(*DEMO, "--steps-per-second", "10000")
    assert status == 0
    assert b"hit rate" in after_the_view(seen)
