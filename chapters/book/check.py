"""Checks the built site: every link leads to a page and an anchor that are there, and nothing is loaded from elsewhere.

`python -m chapters.book.check build/book` prints what is wrong; 1 if anything is.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
LOADED = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    """The anchors, links and assets of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.assets = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag == "link" and LOADED & set(found.get("rel", "").split()):
            self.assets.add(found["href"])
        elif ASSETS.get(tag, "") in found:
            self.assets.add(found[ASSETS[tag]])


def faults(site: Path) -> list[str]:
    """What is wrong, one line each."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [f"{path.relative_to(site)}: loads from elsewhere" for path in sorted(site.rglob("*.css")) if imports(path)]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {asset} from elsewhere" for asset in page.assets if is_elsewhere(asset)]
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
