"""The files of the page: what a browser is told about them, and what it must not find in them."""

import asyncio
import re
from html.parser import HTMLParser

import pytest
from httpx2 import Response

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.extras.page.playground import FOLDER
from tests.phase6_integration.fake_engine import FakeEngine, client

FILES = {file.relative_to(FOLDER).as_posix(): file for file in FOLDER.rglob("*.*")}
TYPES = {
    "html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml", "jsonl": "application/jsonl",
}  # fmt: skip


def get(path: str, settings: ServerSettings | None = None, **headers: str) -> Response:
    async def send() -> Response:
        async with client(FakeEngine(), settings) as http:
            response: Response = await http.get(path, headers=headers)
            return response

    return asyncio.run(send())


def test_every_file_is_served_without_a_key_and_no_document_lists_it() -> None:
    settings = connect.settings(api_keys=("sk-1",))
    assert {"style.css", "main.js", "viewer/viewer.js"} < FILES.keys()
    for name, file in FILES.items():
        answer = get("/" if name == "index.html" else f"/static/{name}", settings)
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), name
        assert answer.headers["content-type"] == TYPES[file.suffix[1:]], name
    assert [
        path for path in create_app(FakeEngine(), settings).openapi()["paths"] if "static" in path or path == "/"
    ] == []


@pytest.mark.parametrize(
    "path", ["/static/", "/static", "/static/none.js", "/static/../playground.py", "/static/%2e%2e/playground.py"]
)
def test_nothing_else_is_served_from_there(path: str) -> None:
    assert get(path).status_code == 404


def test_a_browser_asks_again_and_gets_what_has_changed_only() -> None:
    first = get("/static/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = get("/static/main.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert get("/static/api.js", **{"if-none-match": first.headers["etag"]}).status_code == 200


def test_the_policy_allows_what_this_server_sends_and_nothing_inline() -> None:
    headers = get("/").headers
    allowed = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert {name for name, value in allowed.items() if value == "'self'"} == {
        f"{kind}-src" for kind in ("script", "style", "img", "connect")
    }
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == {
        name for name, value in allowed.items() if value == "'none'"
    }
    assert len(allowed) == 8
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup() -> None:
    markup = "innerHTML|outerHTML|insertAdjacentHTML|srcdoc|DOMParser|createContextualFragment"
    dangerous = rf"{markup}|document\.write|\beval\b|new Function"
    elsewhere = r"(?:from|import|fetch\(|src=|href=|url\()\s*[\"'`(]*(?:https?:)?//"
    for name, file in FILES.items():
        text = file.read_text("utf-8")
        assert not re.search(dangerous, text), name
        assert not re.search(elsewhere, text), name


class Ids(HTMLParser):
    found: list[str | None]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if name == "id"]


def test_every_element_that_a_script_asks_for_is_there_once() -> None:
    parser = Ids()
    parser.found = []
    parser.feed(FILES["index.html"].read_text("utf-8"))
    asked = {name for file in FOLDER.glob("*.js") for name in re.findall(r'\$\("([\w-]+)"\)', file.read_text("utf-8"))}
    assert len(asked) > 15
    assert asked <= set(parser.found)
    assert len(parser.found) == len(set(parser.found))
