"""Pages of the source files that the book links to, one anchor for each line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

PLACES = re.compile(r"(?:(?:phase\d_\w+|chapters|tests|\.ci)/)?[\w./-]+\.(?:py|pyi|toml|json|md|sh)")


class Sources:
    """The files of a checkout. Each that is asked for becomes a page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._asked: set[str] = set()

    def page(self, path: str) -> str:
        """The name of the page of a file."""
        self._asked.add(path)
        return f"source/{path}"

    def find(self, docname: str, text: str) -> str | None:
        """The source file that a code span names: from the root, or in a chapter from the folder of its phase."""
        if not text.endswith(".py") or not PLACES.fullmatch(text):
            return None
        number = re.match(r"chapters/0(\d)_", docname)
        folders = [self.root, *(self.root.glob(f"phase{number[1]}_*") if number else ())]
        found = [folder / text for folder in folders if (folder / text).is_file()]
        return found[0].relative_to(self.root).as_posix() if found else None

    def pages(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Page name, context and template of every file that was asked for."""
        for path in sorted(self._asked):
            text = (self.root / path).read_text("utf-8")
            form = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
            try:
                lexer = get_lexer_for_filename(path)
            except ClassNotFound:
                lexer = get_lexer_for_filename("x.txt")
            body = f'<h1 class="source">{path}</h1>{highlight(text, lexer, form)}'
            yield f"source/{path}", {"title": path, "body": body}, "page.html"
