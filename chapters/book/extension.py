"""The Sphinx extension of the book: what GitHub does not show, added to the same Markdown.

A listing is captioned with a link to its place in the source, links to source files lead to pages of them with an
anchor for each line, the first mention of a term shows its meaning, and scenes run in the page.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx import addnodes, application
from sphinx.application import Sphinx
from sphinx.project import Project

from chapters.book.pack import CHAPTERS, packages
from chapters.predictions import MARK, Asked
from chapters.source import locate

BOOK = Path(__file__).parent
COMMENT = re.compile(r"\s*<!--(?:(?!-->).)*-->\s*", re.DOTALL)
# Terms that are plain English too, so that a first occurrence says little about its meaning.
PLAIN = (
    "abort attach attention block computed drain greedy here iteration lab lock page phase publish rank record region "
    "request running sequence step token weave"
)


class TwoOfOneName(Project):
    """Names the page of a notebook, since it may be beside a chapter of the same name."""

    def path2doc(self, filename: Any) -> Any:
        name = super().path2doc(filename)
        return f"{name}-notebook" if str(filename).endswith(".ipynb") and not name.endswith("-notebook") else name


def setup(app: Sphinx) -> dict[str, bool]:
    application.Project = TwoOfOneName  # made after the extensions, used before the first event
    app.connect("builder-inited", begin)
    app.connect("source-read", prepare)
    app.connect("doctree-read", finish, priority=400)  # before Sphinx collects files to download
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", map_imports)
    return {"parallel_read_safe": False}


def begin(app: Sphinx) -> None:
    app.linked_sources = set()  # files of which there is a page


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add what runs in the book, and the table of contents, to the first page. Leave out the marks of figures, links to
    folders, and the links to the pages before and after: each page has them at its end."""
    text = re.sub(r"(?<!`)<!-- /?measured\b(?:(?!-->).)*-->(?!`)", "", source[0])  # between ` it is shown
    text = re.sub(r"^\[[^|\n]*\| \[Map\]\(map\.md\)( \|.*)?$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]+)\]\(([\w./-]*/[\w-]+)/?\)", lambda link: without_folder(app, docname, link), text)
    chapter = re.match(r"chapters/0?(\d+)_\w+$", docname)
    if chapter and (here := CHAPTERS.get(int(chapter[1]))):
        which = f"{chapter[1]}.{here[0]} to {chapter[1]}.{here[-1]}"
        link = f'<p><a class="here" href="book/pages/exercises.html#{chapter[1]}">Solve {which} in the browser</a></p>'
        text = text.replace("\n## Exercises\n", f"\n## Exercises\n\n{link}\n")
    if chapter:
        page, folder = Path(docname).name, Path(app.srcdir, "chapters")
        beside = next(folder.glob(f"{page}.ipynb"), None) or min(folder.glob(f"{page[:2]}_*.ipynb"))
        exercises = ' · <a href="#exercises">Exercises</a>' if re.search("^##+ Exercises$", text, re.MULTILINE) else ""
        links = f'<p class="beside"><a href="{beside.stem}-notebook.html">Notebook</a>{exercises}</p>'
        text = re.sub(r"^(# .+\n)", rf"\1\n{links}\n", text, count=1)
    if docname == app.config.root_doc:
        text = re.sub(r"^(# .+\n)", rf"\1\n{(BOOK / 'first.md').read_text('utf-8')}\n", text, count=1)
        text = text.replace("\n## Set-up\n", f"\n{(BOOK / 'contents.md').read_text('utf-8')}\n## Set-up\n")
    source[0] = text


def without_folder(app: Sphinx, docname: str, link: re.Match[str]) -> str:
    return link[1] if (Path(app.srcdir, docname).parent / link[2]).is_dir() else link[0]


def finish(app: Sphinx, document: nodes.document) -> None:
    docname = app.env.docname
    caption_listings(app, docname, document)
    if docname.endswith("-notebook"):
        lead_back(app, document)
    for link in list(document.findall(addnodes.download_reference)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(docname), link["reftarget"]))
        link.replace_self(to_source(app, docname, path, "", *link.children))
    if docname.startswith("chapters/") and docname != "chapters/glossary":
        explain_terms(app, document)
    for table in document.findall(nodes.table):
        if table.next_node(nodes.tgroup)["cols"] > 4:
            table["classes"].append("wide")


def lead_back(app: Sphinx, document: nodes.document) -> None:
    """A link from a notebook to the chapter that it measures."""
    number = Path(app.env.docname).name[:2]
    title = document.next_node(nodes.title)
    if title and number.isdigit():
        chapter = min(
            Path(app.srcdir, "chapters").glob(f"{number}_*.md"),
            key=lambda page: not page.with_suffix(".ipynb").exists(),
        )
        link = f'<p class="beside"><a href="{chapter.stem}.html">Chapter {int(number)}</a></p>'
        title.parent.insert(1, nodes.raw("", link, format="html"))


def to_source(app: Sphinx, docname: str, path: str, anchor: str, *children: nodes.Node) -> nodes.reference:
    """A link to the page of a source file."""
    app.linked_sources.add(path)
    uri = app.builder.get_relative_uri(docname, f"source/{path}") + anchor
    return nodes.reference("", "", *children, internal=True, refuri=uri)


def caption_listings(app: Sphinx, docname: str, document: nodes.document) -> None:
    """Remove HTML comments. The block after a `weave` comment gets a caption: its file and line."""
    for comment in [raw for raw in document.findall(nodes.raw) if COMMENT.fullmatch(raw.astext())]:
        anchor = re.search(r"<!-- weave: (\S+)", comment.astext())
        block = comment.next_node(siblings=True, descend=False)
        if anchor and isinstance(block, nodes.literal_block):
            path, line = anchor[1].partition("#")[0], locate(Path(app.srcdir), anchor[1])[1][0][0] + 1
            caption = to_source(app, docname, path, f"#L-{line}", nodes.Text(f"{path}:{line}"))
            group = nodes.container("", nodes.paragraph("", "", caption), block.deepcopy(), classes=["listing"])
            block.replace_self(group)
        scene, guess = re.search(r"<!-- scene: (\w+) -->", comment.astext()), MARK.search(comment.astext())
        if scene:
            comment.replace_self(nodes.raw("", f'<div class="scene" data-scene="{scene[1]}"></div>', format="html"))
        elif guess:
            asked = Asked.of(guess, BOOK.parent / "results")
            said = f'data-guess="{asked.key}" data-found="{asked.number:g}" data-shown="{asked.shown}"'
            comment.replace_self(nodes.raw("", f'<div class="guess" {said}></div>', format="html"))
        else:
            comment.parent.remove(comment)


def terms() -> list[tuple[re.Pattern[str], str]]:
    """Of each row of the glossary, what finds its names in prose, in singular and plural, and what it means."""
    page = (BOOK.parent / "glossary.md").read_text("utf-8")
    found = []
    for first, others, meaning in re.findall(r"^\| \*\*(.+?)\*\*(.*?) \| (.+?) \|", page, re.MULTILINE):
        names = {first, *(name.strip(" *") for name in others.split(","))} - {"", *PLAIN.split()}
        if names:
            any_name = "|".join(f"{re.escape(name)}s?" for name in sorted(names, key=len, reverse=True))
            case = re.NOFLAG if first.isupper() else re.IGNORECASE
            text = re.sub(r"[`*]", "", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", meaning))
            found.append((re.compile(rf"(?<![\w`-])(?:{any_name})(?![\w-])", case), text))
    return found


def explain_terms(app: Sphinx, document: nodes.document) -> None:
    """Let the first mention of each term in the prose show its meaning."""
    open_terms = terms()
    for text in list(prose(document)):
        pieces: list[nodes.Node] = [text]
        for term in list(open_terms):
            pattern, meaning = term
            for place, piece in enumerate(pieces):
                match = pattern.search(piece) if isinstance(piece, nodes.Text) else None
                if match:
                    mention = nodes.abbreviation("", match[0], explanation=meaning)
                    around = (nodes.Text(piece[: match.start()]), mention, nodes.Text(piece[match.end() :]))
                    pieces[place : place + 1] = around
                    open_terms.remove(term)
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


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Page name, context and template of every file that a page links to."""
    for path in sorted(app.linked_sources):
        form = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
        lexer = get_lexer_for_filename("x.txt" if path.endswith("Dockerfile") else path)
        code = highlight(Path(app.srcdir, path).read_text("utf-8"), lexer, form)
        yield f"source/{path}", {"title": path, "body": f'<h1 class="source">{path}</h1>{code}'}, "page.html"


def map_imports(
    app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """Tell the page of exercises where the packages of its editor are."""
    if page == "chapters/book/pages/exercises":
        tab = app.builder.get_relative_uri(page, "tab/npm").removesuffix(".html")
        described = {name: json.loads((folder / "package.json").read_text("utf-8")) for name, folder in packages()}
        modules = {
            name: each.get("module") or each["exports"]["import"]
            for name, each in described.items()
            if name != "pyodide"
        }
        places = {name: f"{tab}/{name}/{module}" for name, module in modules.items()}
        app.add_js_file(None, body=json.dumps({"imports": places}), type="importmap", priority=100)
