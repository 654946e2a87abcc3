"""The playground: what a browser would hold it to. nothing from elsewhere, nothing inline, and what the server says."""

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from httpx import Response

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from tests.phase6_integration.fake_engine import FakeEngine, client


class Page(HTMLParser):
    """Elements with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.html = html
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def text(self, tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", self.html, re.DOTALL)
        return str(text)

    @property
    def ids(self) -> list[str | None]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def function(self, head: str) -> str:
        """The body of a function of the script."""
        (body,) = re.findall(rf"function {re.escape(head)} \{{\n(.*?)\n\}}", self.text("script"), re.DOTALL)
        return str(body)


def ask(method: str, path: str, **body: object) -> Response:
    async def send() -> Response:
        async with client(FakeEngine(), ServerSettings()) as http:
            response: Response = await http.request(method, path, **body)
            return response

    return asyncio.run(send())


@pytest.fixture(scope="module")
def answer() -> Response:
    return ask("GET", "/")


@pytest.fixture(scope="module")
def page(answer: Response) -> Page:
    return Page(answer.text)


def test_it_is_a_page_that_no_document_lists(answer: Response, page: Page) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert len(page.ids) == len(set(page.ids))
    assert "/" not in create_app(FakeEngine(), ServerSettings()).openapi()["paths"]


def test_the_policy_allows_this_script_and_style_and_no_other(answer: Response, page: Page) -> None:
    policy = answer.headers["content-security-policy"]
    allowed = {name: value for name, _, value in (part.partition(" ") for part in policy.split("; "))}
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert {"base-uri", "form-action", "frame-ancestors"} <= {n for n, value in allowed.items() if value == "'none'"}
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.text(tag).encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy


def test_nothing_comes_from_elsewhere_and_nothing_is_inline_that_the_policy_would_stop(page: Page) -> None:
    script = page.text("script")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*|\s//\s.*", "", page.html, flags=re.M))
    for tag, attributes in page.elements:
        assert attributes.get("src") is None, tag
        assert attributes.get("href") in (None, "data:,"), tag
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    assert sorted(re.findall(r'fetch\("([^"]*)"', script)) == ["stats", "v1/chat/completions"]
    assert script.count("fetch(") == 2
    assert 'setAttribute("style"' not in script


def test_what_a_model_says_is_text_and_a_key_is_kept_nowhere(page: Page) -> None:
    script = page.text("script")
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser"
    assert not re.search(dangerous, script)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", script)
    assert "shown.appendData(piece)" in script
    (key,) = [attributes for _, attributes in page.elements if attributes.get("id") == "key"]
    assert (key["type"], key["autocomplete"]) == ("password", "off")


def test_every_element_the_script_asks_for_is_there(page: Page) -> None:
    asked = set(re.findall(r'\$\("(\w+)"\)', page.text("script")))
    assert len(asked) > 15
    assert asked <= set(page.ids)


def test_the_strip_reads_what_stats_says(page: Page) -> None:
    """Every field that it names is one of the server's."""
    stats, body = ask("GET", "/stats").json(), page.function("show(stats)")
    assert set(re.findall(r"stats\.(\w+)", body)) == {"model", "health", "reason", "uptime_seconds"} < set(stats)
    inner = set(re.findall(r"\b(requests|pages|prefix|tokens|speculation)\.(\w+)", body))
    assert len(inner) == 11
    for group, name in inner:
        assert name in stats["prefix_cache" if group == "prefix" else group], (group, name)
