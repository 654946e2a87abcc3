"""The Sphinx extension of the book: what GitHub does not show, added to the same Markdown.

A listing is captioned with a link to its place in the source, a mention of a source file leads to the page of that
file, and the first mention of a term shows its meaning.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes, application
from sphinx.application import Sphinx
from sphinx.project import Project
from sphinx.util.logging import getLogger

from chapters.book.pages import below, contents, terms
from chapters.book.sources import Sources
from chapters.course import CourseError
from chapters.source import locate

log = getLogger(__name__)
COMMENT = re.compile(r"\s*<!--(?:(?!-->).)*-->\s*", re.DOTALL)


class TwoOfOneName(Project):
    """Names the page of a notebook, since it may be beside a chapter of the same name."""

    def path2doc(self, filename: Any) -> Any:
        name = super().path2doc(filename)
        return f"{name}-notebook" if str(filename).endswith(".ipynb") and not name.endswith("-notebook") else name


def setup(app: Sphinx) -> dict[str, bool]:
    application.Project = TwoOfOneName  # made after the extensions, used before the first event
    app.connect("builder-inited", begin)
    app.connect("source-read", list_pages)
    app.connect("doctree-read", finish_page, priority=400)  # before Sphinx collects files to download
    app.connect("html-collect-pages", lambda app: app.sources.pages())
    return {"parallel_read_safe": False}


def begin(app: Sphinx) -> None:
    app.sources = Sources(Path(app.srcdir))


def list_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the table of contents to the first page, and to a chapter its notebooks. Leave out the marks of figures, and
    the links to the pages before and after: each page has them at its end."""
    source[0] = re.sub(r"(?<!`)<!-- /?measured\b(?:(?!-->).)*-->(?!`)", "", source[0])  # between ` it is shown
    source[0] = re.sub(r"^\[[^|\n]*\| \[Map\]\(map\.md\)( \|.*)?$", "", source[0], flags=re.MULTILINE)
    if docname == app.config.root_doc:
        for title, pages in contents():
            source[0] += "\n" + toctree(pages, f":caption: {title}\n")
    elif pages := below(docname):
        source[0] += "\n" + toctree(pages)


def toctree(pages: list[str], options: str = "") -> str:
    listed = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n{options}\n{listed}\n```\n"


def finish_page(app: Sphinx, document: nodes.document) -> None:
    docname = app.env.docname
    caption_listings(app, docname, document)
    link_sources(app, docname, document)
    if docname == "chapters/glossary":
        mark_terms(document)
    elif docname.startswith("chapters/"):
        explain_terms(app, docname, document)
    for table in document.findall(nodes.table):
        if table.next_node(nodes.tgroup)["cols"] > 4:
            table["classes"].append("wide")


def caption_listings(app: Sphinx, docname: str, document: nodes.document) -> None:
    """Remove HTML comments. The block after a `weave` comment gets a caption: its file and line."""
    for comment in [raw for raw in document.findall(nodes.raw) if COMMENT.fullmatch(raw.astext())]:
        anchor = re.search(r"<!-- weave: (\S+)", comment.astext())
        block = comment.next_node(siblings=True, descend=False)
        if anchor and isinstance(block, nodes.literal_block):
            path = anchor[1].partition("#")[0]
            try:
                line = locate(app.sources.root, anchor[1])[1][0][0] + 1
            except CourseError as error:
                log.warning(str(error), location=comment)
                continue
            uri = app.builder.get_relative_uri(docname, app.sources.page(path)) + f"#L-{line}"
            caption = nodes.paragraph("", "", nodes.reference("", f"{path}:{line}", internal=True, refuri=uri))
            block.replace_self(nodes.container("", caption, block.deepcopy(), classes=["listing"]))
        comment.parent.remove(comment)


def link_sources(app: Sphinx, docname: str, document: nodes.document) -> None:
    """Let links to files, and files named in code spans, lead to the pages of those files."""
    for link in list(document.findall(addnodes.download_reference)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(docname), link["reftarget"]))
        uri = app.builder.get_relative_uri(docname, app.sources.page(path))
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))
    for code in list(document.findall(nodes.literal)):
        inside_link = isinstance(code.parent, nodes.reference | addnodes.pending_xref)
        path = app.sources.find(docname, code.astext())
        if path and not inside_link and not isinstance(code.parent, nodes.title):
            uri = app.builder.get_relative_uri(docname, app.sources.page(path))
            code.replace_self(nodes.reference("", "", code.deepcopy(), internal=True, refuri=uri))


def mark_terms(document: nodes.document) -> None:
    """Give each row of the glossary its anchor."""
    rows = {
        row.next_node(nodes.strong).astext(): row for row in document.findall(nodes.row) if row.next_node(nodes.strong)
    }
    for term in terms():
        rows[term.names[0]]["ids"].append(term.anchor)


def explain_terms(app: Sphinx, docname: str, document: nodes.document) -> None:
    """Let the first mention of each term in the prose show its meaning, and lead to the glossary."""
    glossary = app.builder.get_relative_uri(docname, "chapters/glossary")
    open_terms = [(term, term.pattern) for term in terms() if term.pattern]
    for text in list(prose(document)):
        pieces: list[nodes.Node] = [text]
        for term, pattern in list(open_terms):
            for place, piece in enumerate(pieces):
                match = pattern.search(piece) if isinstance(piece, nodes.Text) else None
                if match:
                    uri = f"{glossary}#{term.anchor}"
                    link = nodes.reference(
                        "", match[0], internal=True, refuri=uri, reftitle=term.meaning, classes=["term"]
                    )
                    around = (nodes.Text(piece[: match.start()]), link, nodes.Text(piece[match.end() :]))
                    pieces[place : place + 1] = around
                    open_terms.remove((term, pattern))
                    break
        if len(pieces) > 1:
            text.parent.replace(text, [piece for piece in pieces if piece.astext()])


def prose(document: nodes.document) -> Iterator[nodes.Text]:
    """The text of paragraphs, without code, links and tables."""
    for paragraph in document.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, nodes.entry | nodes.container):
            for text in paragraph.findall(nodes.Text):
                if isinstance(text.parent, nodes.paragraph | nodes.emphasis | nodes.strong):
                    yield text
