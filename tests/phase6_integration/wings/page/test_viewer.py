"""What the viewer says of the source is so."""

import ast
import json
import re
from pathlib import Path

from phase6_integration.wings.page.replay import VIEWER, bundle

ROOT = Path(__file__).parents[4]


def test_each_mechanism_is_where_the_viewer_says() -> None:
    _, _, table = (VIEWER / "mechanisms.js").read_text("utf-8").partition("MECHANISMS = ")
    for key, about in json.loads(table.strip().removesuffix(";")).items():
        names = set[str]()
        for node in ast.parse((ROOT / about["file"]).read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names |= {
                    node.name,
                    *(f"{node.name}.{each.name}" for each in ast.walk(node) if isinstance(each, ast.FunctionDef)),
                }
        assert about["name"] in names, key
        headings = re.findall(r"^#+ (.+)$", (ROOT / about["chapter"]).read_text("utf-8"), re.MULTILINE)
        assert about["section"] in headings, key


def test_a_replay_has_every_module_of_the_viewer() -> None:
    script = bundle("replay.js")
    assert (
        re.findall(r"^modules\['([\w.]+)'\] = ", script, re.MULTILINE).sort()
        == [p.name for p in VIEWER.glob("*.js")].sort()
    )
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
