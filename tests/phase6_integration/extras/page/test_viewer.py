"""What the viewer says of the source is so."""

import gzip
import math
import re
from collections.abc import Callable
from itertools import combinations

import numpy as np

from phase5_continuous.extras.record.lines import Line
from phase6_integration.cli.replay_command import checked
from phase6_integration.cli.serve_command import DEMO
from phase6_integration.extras.page.replay import bundle
from phase6_integration.extras.page.sources import ROOT, VIEWER, mechanisms, sources


def test_each_mechanism_is_where_the_viewer_says() -> None:
    shown = sources()
    for key, about in mechanisms().items():
        name = about["name"].rpartition(".")[2]
        assert re.match(rf"\s*(@.*\s+)?(class|def) {name}\b", shown[key]["text"]), key
        first = (ROOT / about["file"]).read_text("utf-8").splitlines()[shown[key]["line"] - 1]
        assert shown[key]["text"].startswith(first.strip()), key
        headings = re.findall(r"^#+ (.+)$", (ROOT / about["chapter"]).read_text("utf-8"), re.MULTILINE)
        assert about["section"] in headings, key


def test_a_replay_has_every_module_of_the_viewer() -> None:
    script = bundle("replay.js")
    names = re.findall(r"^modules\['([\w.]+)'\] = ", script, re.MULTILINE)
    assert sorted(names) == sorted(file.name for file in VIEWER.glob("*.js"))
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_the_bundled_record_is_one_and_tells_its_story_in_order() -> None:
    """`python -m phase6_integration.lab sample_record --first FILE` writes it, small: it is on the first screen."""
    file = VIEWER / "first.jsonl"
    assert len(gzip.compress(file.read_bytes())) < 8 * 1024
    header, *lines = checked(file, "a test")
    assert [header[key] for key in ("num_pages", "budget", "chunk")] == [*DEMO.values()]

    def first(what: Callable[[Line], object]) -> int:
        return next(at for at, line in enumerate(lines) if what(line))

    def operations(line: Line) -> set[str]:
        return {name for name, *_ in line.get("pages", ())}

    page = first(lambda line: len(line.get("decode", ())) == 1 and "grow" in operations(line))
    sharing = first(lambda line: sum(cached > 0 for _, cached in line.get("admitted", ())) > 3)
    batch = first(lambda line: len(line.get("decode", ())) > 7 and "pages" not in line)
    chunks = first(lambda line: [length for *_, length in line.get("prefill", ())] == [header["chunk"]])
    eviction, preemption = first(lambda line: "evict" in operations(line)), first(lambda line: "preempted" in line)
    assert page < sharing < batch < chunks < eviction < preemption
    assert len(lines[chunks]["decode"]) > 7, "a chunk shares its step with decodes"
    assert all(len(lines[at]["decode"]) > 7 for at in range(chunks, chunks + 4))


# Machado, Oliveira and Fernandes 2009, in linear RGB: what is seen with one kind of cone missing.
SIGHT = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]  # over that of white


def lab(colour: str, sight: list[list[float]]) -> list[float]:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = np.maximum(np.array(XYZ) @ np.array(sight) @ linear, 0)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def test_requests_are_told_apart_by_the_colour_blind() -> None:
    style = (VIEWER / "viewer.css").read_text("utf-8")
    pairs = re.findall(r"--v-(?:hue-\d|cached): light-dark\((#\w{6}), (#\w{6})\);", style)
    assert len(pairs) == 9
    for name, sight in SIGHT.items():
        for theme in zip(*pairs, strict=True):
            seen = [lab(colour, sight) for colour in theme]
            assert min(math.dist(one, other) for one, other in combinations(seen, 2)) > 18, (name, theme)
