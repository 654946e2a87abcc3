"""The page of a server, as a visitor uses it."""

import pytest
from playwright.sync_api import expect


def test_a_chat_streams(serve, visit) -> None:
    page = visit(serve())
    page.get_by_role("textbox", name="Message", exact=True).fill("What is a KV cache?")
    page.get_by_role("button", name="Send").click()
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer).to_contain_text("keys and values")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_serious(serve, visit, accessible, width: int, theme: str) -> None:
    accessible(visit(serve(), width=width, theme=theme))
