"""The engine as the page shows it, live: its pages, who may watch, and whose text is shown."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

KEY = "sk-of-the-browser"
SMALL = ("--kv-cache-pages", "96")


def pool(page: Page) -> Locator:
    return page.get_by_role("img", name="The pool: ")


def counts(page: Page) -> dict[str, int]:
    """How many pages there are of each kind, as the page says it to a screen reader."""
    found = re.findall(
        r"(\d+) (?:pages )?(shared|of one request|cached|free)", pool(page).get_attribute("aria-label") or ""
    )
    return {kind: int(number) for number, kind in found}


ENDLESS = {"ignore_eos": True}  # an answer of the model's own length is over before a busy browser draws a frame
ASK = """body => void fetch("/v1/chat/completions",
  {method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body)})"""


def seen(page: Page, pattern: str) -> None:
    """Wait until a picture of the pool is so: it may be so for an instant only."""
    find = "pattern => RegExp(pattern).test(document.querySelector('.v-pages canvas').getAttribute('aria-label'))"
    page.wait_for_function(find, arg=pattern)


def start(page: Page, name: str) -> None:
    if page.get_by_role("button", name="Several at once").get_attribute("aria-expanded") != "true":
        page.get_by_role("button", name="Several at once").click()
    page.get_by_role("button", name=name).click()


def test_the_map_changes_with_a_request_and_keeps_what_it_computed(serve, visit) -> None:
    page = visit(serve(*SMALL))
    expect(pool(page)).to_be_visible()
    before = counts(page)
    page.evaluate(ASK, {"messages": [{"role": "user", "content": "What is the Sun?"}], "max_tokens": 600, **ENDLESS})
    seen(page, r" [1-9]\d* of one request")
    seen(page, " 0 of one request")
    after = counts(page)
    assert sum(after.values()) == sum(before.values()) == 96
    assert after["cached"] > before["cached"]
    assert after["free"] < before["free"]


def test_requests_that_begin_alike_share_pages(serve, visit) -> None:
    page = visit(serve(*SMALL))
    start(page, "8 that share a prefix")
    seen(page, r"[1-9]\d* pages shared")
    expect(page.get_by_text("8 of 8 have ended")).to_be_visible()
    seen(page, " 0 pages shared")


def test_many_short_questions_are_distinct_and_known_to_the_model(serve, visit) -> None:
    page = visit(serve())
    start(page, "32 short ones")
    expect(page.get_by_text("32 of 32 have ended")).to_be_visible()
    rows = page.locator("#crowd-list li").all_text_contents()
    asked, answers = zip(*(row.split("?", 1) for row in rows), strict=True)
    assert len(set(asked)) == 32
    for question, answer in zip(asked, answers, strict=True):
        thing = question.removeprefix("What is ")
        assert answer.strip().lower().startswith(f"{thing.lower()} is "), (question, answer)


def test_an_abort_frees_pages(serve, visit) -> None:
    page = visit(serve(*SMALL))
    start(page, "A long one")
    seen(page, r" [1-9]\d* of one request")
    page.get_by_role("button", name="Abort all").click()
    expect(page.get_by_text("Aborted; 0 of 1 had ended")).to_be_visible()
    seen(page, " 0 of one request")


def test_the_page_opens_the_stream_again_with_what_the_engine_has_by_then(serve, visit) -> None:
    url = serve(*SMALL)
    page = visit(url)
    ask(url, "What is a comet?")
    seen(page, r"[1-9]\d* cached")
    expected = counts(page)
    page.reload()
    seen(page, rf" {expected['cached']} cached")
    assert counts(page) == expected


# Who may watch, and what.


def request(url: str, path: str, key: str | None, body: object = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return urllib.request.Request(url + path, json.dumps(body).encode() if body else None, headers)


def ask(url: str, question: str, key: str | None = None) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8}
    with urllib.request.urlopen(request(url, "/v1/chat/completions", key, body)) as answer:
        assert answer.status == 200


def lines(url: str, key: str | None) -> Iterator[dict[str, object]]:
    """The record, from its header on."""
    with urllib.request.urlopen(request(url, "/record", key), timeout=30) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def test_without_a_key_nobody_watches_where_keys_are_set(serve, visit) -> None:
    url = serve("--api-key", KEY)
    for key in (None, "sk-of-another"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            next(lines(url, key))
        assert refused.value.code == 401
    page = visit(url, faults="401")
    expect(page.get_by_text("To watch the engine, give the API key")).to_be_visible()
    page.get_by_label("This server needs an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(pool(page)).to_be_visible()


@pytest.mark.parametrize(("flags", "key", "shown"), [(SMALL, None, True), (("--api-key", KEY), KEY, False)])
def test_the_text_of_requests_is_in_the_record_only_where_nobody_else_can_watch(serve, flags, key, shown) -> None:
    url = serve(*flags)
    record = lines(url, key)
    header = next(record)
    assert header["text"] is shown
    ask(url, "What is a haiku?", key)
    seen = list[str]()
    for line in record:
        seen.append(json.dumps(line))
        if "done" in line:
            break
    assert bool(re.search('"tokens"|"ids"|"vocab"', "".join(seen))) is shown


def test_with_keys_the_page_shows_the_text_of_its_own_requests_only(serve, visit) -> None:
    url = serve("--api-key", KEY)
    page = visit(url, faults="401")
    page.get_by_label("This server needs an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(pool(page)).to_be_visible()
    page.get_by_role("button", name="How does prefix caching work?").click()
    page.get_by_role("button", name="In the engine").click()
    requests = page.get_by_role("region", name="Requests")
    expect(requests).to_contain_text("How does prefix caching work?")
    expect(requests).to_contain_text("computes only the rest")
