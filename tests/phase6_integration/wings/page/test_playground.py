"""The playground: what a browser would hold it to. Nothing from elsewhere, nothing inline, everything has a name."""

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient, Response

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.wings.page.playground import router
from tests.phase6_integration.fake_engine import FakeEngine

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """Elements with their attributes and the text in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.open: list[int] = []
        self.parents: dict[int, list[int]] = {}
        self.unclosed: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        number = len(self.elements)
        self.elements.append((tag, dict(attributes)))
        self.texts[number], self.parents[number] = "", list(self.open)
        if tag not in VOID:
            self.open.append(number)

    def handle_endtag(self, tag: str) -> None:
        if self.elements[self.open[-1]][0] != tag:
            self.unclosed.append(tag)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for number in self.open:
            self.texts[number] += data

    def of(self, *tags: str) -> list[int]:
        return [number for number, (tag, _) in enumerate(self.elements) if tag in tags]

    def text(self, tag: str) -> str:
        (number,) = self.of(tag)
        return self.texts[number]


def ask(app: FastAPI, method: str, path: str, **body: object) -> Response:
    async def asked() -> Response:
        async with AsyncClient(transport=ASGITransport(app), base_url="http://testserver") as http:
            return await http.request(method, path, **body)  # type: ignore[arg-type]

    return asyncio.run(asked())


@pytest.fixture(scope="module")
def answer() -> Response:
    app = FastAPI()
    app.include_router(router)
    assert "/" not in app.openapi()["paths"]
    return ask(app, "GET", "/")


@pytest.fixture(scope="module")
def page(answer: Response) -> Page:
    return Page(answer.text)


def policy(answer: Response) -> dict[str, str]:
    parts = answer.headers["content-security-policy"].split("; ")
    return {name: value for name, _, value in (part.partition(" ") for part in parts)}


def test_it_is_a_page_that_is_whole(answer: Response, page: Page) -> None:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert page.unclosed == []
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_policy_allows_this_script_and_style_and_no_other(answer: Response, page: Page) -> None:
    allowed = policy(answer)
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert {"base-uri", "form-action", "frame-ancestors"} <= {n for n, value in allowed.items() if value == "'none'"}
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.text(tag).encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_nothing_comes_from_elsewhere(answer: Response, page: Page) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"^\s*//.*|\s//\s.*", "", answer.text, flags=re.M))
    for tag, attributes in page.elements:
        assert attributes.get("src") is None, tag
        assert attributes.get("href") in (None, "data:,"), tag
    fetched = re.findall(r'fetch\("([^"]*)"', page.text("script"))
    assert sorted(fetched) == ["stats", "v1/chat/completions"]
    assert page.text("script").count("fetch(") == 2


def test_nothing_is_inline_that_the_policy_would_stop(page: Page) -> None:
    for tag, attributes in page.elements:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
    assert 'setAttribute("style"' not in page.text("script")


def test_what_a_model_says_is_text_and_a_key_is_kept_nowhere(page: Page) -> None:
    script = page.text("script")
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser"
    assert not re.search(dangerous, script)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", script)
    assert "shown.appendData(piece)" in script
    (key,) = [a for tag, a in page.elements if a.get("id") == "key"]
    assert (key["type"], key["autocomplete"]) == ("password", "off")


def test_every_control_has_a_name(page: Page) -> None:
    named_by = {page.elements[number][1].get("for"): page.texts[number].strip() for number in page.of("label")}
    labels = set(page.of("label"))
    for number in page.of("input", "textarea"):
        around = [page.texts[parent].strip() for parent in page.parents[number] if parent in labels]
        assert any(around) or named_by.get(page.elements[number][1].get("id")), page.elements[number]
    assert all(page.texts[number].strip() for number in page.of("button", "summary"))
    assert page.elements[page.of("html")[0]][1]["lang"] == "en"
    assert page.text("title")
    assert len(page.of("h1", "main")) == 2


def test_every_element_the_script_asks_for_is_there(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    asked = set(re.findall(r'\$\("(\w+)"\)', page.text("script")))
    assert len(asked) > 15
    assert asked <= ids


def test_the_strip_reads_what_stats_says(page: Page) -> None:
    """Every field that it names is one of the server's."""
    stats = ask(create_app(FakeEngine(), ServerSettings()), "GET", "/stats").json()
    body = re.search(r"function show\(stats\) \{(.*?)\n\}", page.text("script"), re.DOTALL)
    assert body is not None
    renamed = {"prefix": "prefix_cache"}
    top = set(re.findall(r"stats\.(\w+)", body[1]))
    assert top == {"model", "health", "reason", "uptime_seconds"}
    inner = re.findall(r"\b(requests|pages|prefix|tokens)\.(\w+)", body[1])
    assert len(set(inner)) == 9
    for group, name in inner:
        assert name in stats[renamed.get(group, group)], (group, name)


def test_nothing_is_shown_as_of_now_while_the_server_does_not_answer(page: Page) -> None:
    (state,) = re.findall(r"function state\(words, fault\) \{\n(.*?)\n\}", page.text("script"), re.DOTALL)
    (shown,) = re.findall(r"function show\(stats\) \{\n(.*?)\n\}", page.text("script"), re.DOTALL)
    names = re.compile(r'"(running|waiting|hits|speed|used|cached|counts|bar)"')
    assert set(names.findall(state.partition("if (fault) {")[2].partition("\n  }")[0])) == set(names.findall(shown))
    assert len(set(names.findall(shown))) == 8
    assert "AbortSignal.timeout(" in page.text("script"), "a server that hangs does not answer either"
    assert "locked = response.status === 401;" in page.text("script"), "a refused key is not sent every second"


def test_no_content_makes_the_page_wider_and_the_settings_show_that_they_open(page: Page) -> None:
    style = re.sub(r"\s+", " ", page.text("style"))
    rules = dict(re.findall(r"([^{} ][^{}]*) \{ ([^{}]*) \}", style))
    assert "/ minmax(0, 1fr)" in rules["body"], "a column is as wide as the window, whatever is in it"
    assert "nowrap" not in rules["#counts"]
    assert "display" not in rules["summary"], "only a list item has a marker"


def test_a_chat_that_has_no_room_left_is_offered_a_new_one(page: Page) -> None:
    body = {"messages": [{"role": "user", "content": "one more word " * 1000}]}
    response = ask(create_app(FakeEngine(), ServerSettings()), "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert f'fault.code === "{response.json()["error"]["code"]}"' in page.text("script")
    assert 'full ? wrong(fault, "New chat", anew)' in page.text("script")


def test_both_schemes_are_dressed_and_legible(page: Page) -> None:
    """Text against its ground: 4.5 to 1 at least, as WCAG asks."""
    style = page.text("style")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in re.split(r"@media \(prefers-color", style)[:2]
    )
    assert light.keys() == dark.keys()
    for scheme in (light, dark):
        for words, ground in (
            ("text", "ground"), ("text", "raised"), ("text", "mine"), ("quiet", "ground"), ("quiet", "raised"),
            ("fault", "ground"), ("fault", "raised"), ("on-accent", "accent"),
        ):  # fmt: skip
            assert contrast(scheme[words], scheme[ground]) >= 4.5, (words, ground)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
