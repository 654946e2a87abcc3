"""Checks the built site: every link leads to a page and an anchor that are there, nothing is loaded from elsewhere, and
no Markdown is left in the text.

`python -m chapters.book.check build/book` prints what is wrong; 1 if anything is.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
CODE = {"code", "pre", "script", "style", "title"}
LOADED = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    """The anchors, links and assets of a page, and the texts in which Markdown is left."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.assets = set[str](), set[str](), set[str]()
        self.unread = list[str]()
        self._code = 0  # elements of CODE that are open
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._code += tag in CODE
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag == "link" and LOADED & set(found.get("rel", "").split()):
            self.assets.add(found["href"])
        elif ASSETS.get(tag, "") in found:
            self.assets.add(found[ASSETS[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in CODE

    def handle_data(self, data: str) -> None:
        if not self._code and ("`" in data or "**" in data):
            self.unread.append(" ".join(data.split()))


def faults(site: Path) -> list[str]:
    """What is wrong, one line each."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [f"{path.relative_to(site)}: loads from elsewhere" for path in sorted(site.rglob("*.css")) if imports(path)]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {asset} from elsewhere" for asset in page.assets if is_elsewhere(asset)]
        found += [f"{name}: Markdown in its text: {text:.80}" for text in page.unread]
        for link in sorted(page.links | page.assets):
            if link and not urlsplit(link).scheme and not is_elsewhere(link):
                target, _, anchor = link.partition("#")
                file = (path.parent / unquote(urlsplit(target).path)).resolve() if target else path
                if not file.is_file():
                    found.append(f"{name}: no page {link}")
                elif anchor and file in pages and unquote(anchor) not in pages[file].anchors:
                    found.append(f"{name}: no anchor {link}")
    return found


def is_elsewhere(asset: str) -> bool:
    return asset.startswith("//") or urlsplit(asset).scheme in ("http", "https")


def imports(style: Path) -> bool:
    """Whether a style sheet loads anything by an address."""
    text = style.read_text("utf-8").replace(" ", "").replace("'", "").replace('"', "")
    return any(f"{start}{scheme}" in text for start in ("url(", "@import") for scheme in ("http:", "https:", "//"))


def main(arguments: list[str]) -> int:
    found = faults(Path(arguments[0]))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
