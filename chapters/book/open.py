"""`make try`: the engine in a browser tab, without the rest of the book.

Packs it into build/try, serves that folder to this machine, and opens it: `python -m chapters.book.open [PORT]`.
"""

import shutil
import sys
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from chapters.book.pack import BOOK, ROOT, pack_engine, packages

PORT = 8001


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def prepare(site: Path) -> None:
    """Make the page. Python for the browser (14 MB) is downloaded once, and checked against its hash."""
    pack_engine(site / "tab", packages("pyodide"))
    shutil.copytree(BOOK / "static", site / "_static", dirs_exist_ok=True)
    shutil.copy(BOOK / "templates/try.html", site / "index.html")


def listen(site: Path, port: int) -> ThreadingHTTPServer:
    """Serve a folder on this port, or on any free one if another program has it, such as an earlier `make try`."""
    handler = partial(Quiet, directory=site)
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


def main(port: int) -> None:
    site = ROOT / "build/try"
    prepare(site)
    with listen(site, port) as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        print(f"The engine is at {url} until Ctrl-C.", flush=True)
        webbrowser.open(url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PORT)
