"""A replay: one HTML file with the viewer and a record in it, or two records side by side. It opens from disk."""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from string import Template

from phase6_integration.extras.page.sources import VIEWER, sources

GZIP = b"\x1f\x8b"
IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:class|function|const) (.+)", re.MULTILINE)
NAMES = re.compile(r"^\w+|(?<=, )[A-Z]+(?= = )")  # `name(...) {`, `name = ...`, or `A = 1, B = 2`


def replay(records: Sequence[tuple[str, bytes]]) -> str:
    """The page that shows one record or compares several. Each record is a title and its JSON lines, gzipped or not."""
    script = bundle("replay.js")
    style = "body { margin: 0; }\n" + (VIEWER / "viewer.css").read_text("utf-8")
    return Template((VIEWER / "replay.html").read_text("utf-8")).substitute(
        title=html.escape(" and ".join(title for title, _ in records)),
        script=script,
        script_hash=_hash(script),
        style=style,
        style_hash=_hash(style),
        sources=json.dumps(sources()).replace("</", "<\\/"),
        records="\n".join(_record(title, record) for title, record in records),
    )


def bundle(start: str) -> str:
    """The modules that `start` imports, and it, as one script: each is a function that returns what it exports."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        source = (VIEWER / name).read_text("utf-8")
        for _, other in IMPORT.findall(source):
            if other not in done:
                add(other)
        names = [name for declared in EXPORT.findall(source) for name in NAMES.findall(declared)]
        body = EXPORT.sub(lambda found: found[0].removeprefix("export "), IMPORT.sub(_from_module, source))
        done[name] = f"modules[{name!r}] = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();\n"

    add(start)
    return "const modules = {};\n" + "".join(done.values())


def _from_module(found: re.Match[str]) -> str:
    return f"const {{ {found[1].replace(' as ', ': ')} }} = modules[{found[2]!r}];"


def _record(title: str, record: bytes) -> str:
    packed = record if record.startswith(GZIP) else gzip.compress(record, mtime=0)
    text = base64.b64encode(packed).decode()
    return f'<script type="application/gzip" data-title="{html.escape(title)}">{text}</script>'


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
