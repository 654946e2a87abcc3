"""The cases of other servers' API tests, each a request and what must hold of its answer: see `peers`."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from peers import MORE, PASSING, REFUSED, WRONG
from subject import Server


def ask(server: Server, asked: tuple[Any, ...]) -> tuple[int, Any]:
    """The status, and the answer: of a stream its events."""
    path, body, *more = asked
    headers = {"content-type": "application/json", "authorization": f"Bearer {server.key}"}
    headers |= more[0] if more else {}
    request = urllib.request.Request(server.url.removesuffix("/v1") + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    if "text/event-stream" not in response.headers["content-type"]:
        return 200, json.loads(text)
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return 200, [json.loads(one) for one in data if one != "[DONE]"]


@pytest.mark.parametrize("name", PASSING)
def test_what_a_peer_answers_is_answered(server: Server, name: str) -> None:
    asked, holds = PASSING[name]
    status, answer = ask(server, asked)
    assert status == 200, answer
    assert holds(answer), answer


@pytest.mark.parametrize("name", WRONG)
def test_what_a_peer_refuses_is_refused(server: Server, name: str) -> None:
    status, answer = ask(server, WRONG[name])
    assert (status, bool(answer["error"]["message"])) == (400, True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_purpose_is_an_error_in_words(server: Server, name: str) -> None:
    status, answer = ask(server, REFUSED[name][0])
    assert status in (400, 404), answer
    assert answer["error"]["message"]


@pytest.mark.parametrize("name", MORE)
def test_what_is_answered_on_purpose_is_answered(server: Server, name: str) -> None:
    status, answer = ask(server, MORE[name][0])
    assert status == 200, answer


def test_the_page_has_what_differs_and_why() -> None:
    page = (Path(__file__).parent / "README.md").read_text()
    alike, total = len(PASSING) + len(WRONG), sum(map(len, (PASSING, WRONG, REFUSED, MORE)))
    counts = f"Of {total} cases {alike} end as theirs do, {len(PASSING)} with an answer and {len(WRONG)} with an error."
    assert f"{counts} {len(REFUSED)} are refused on purpose, and {len(MORE)} are answered" in " ".join(page.split())
    for name, (_, reason) in (REFUSED | MORE).items():
        assert f"| {name} | {reason} |" in page
