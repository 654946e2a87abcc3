"""`make try`: the engine in a browser tab, without the rest of the book.

Packs it into build/try, serves that folder to this machine, and opens it: `python -m chapters.book.open [PORT]`.
"""

import argparse
import shutil
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chapters.book.open", description="The engine in a browser tab.")
    parser.add_argument(
        "port", nargs="?", type=int, default=PORT, help=f"{PORT} if left out; a free one if it is in use"
    )
    port, site = parser.parse_args().port, ROOT / "build/try"
    print("Packing the engine for a browser tab. Python for the browser, 14 MB, is downloaded once.", flush=True)
    prepare(site)
    with listen(site, port) as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        print(f"The engine is at {url}\nTake the tour there, or ask a question. Ctrl-C here ends it.", flush=True)
        if not webbrowser.open(url):
            print("No browser was found: open that address in one.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
