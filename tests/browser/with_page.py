"""The page of a server, as a visitor uses it."""

import json
import re

import pytest
from playwright.sync_api import Locator, Page, expect

KEY = "sk-of-the-browser"


def ask(page: Page, question: str) -> Locator:
    """The answer, once it is whole."""
    page.get_by_role("textbox", name="Message", exact=True).fill(question)
    page.get_by_role("button", name="Send", exact=True).click()
    return last_answer(page)


def last_answer(page: Page) -> Locator:
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    answer = page.get_by_role("article", name="Answer").last
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def test_a_question_of_the_first_screen_is_answered(serve, visit) -> None:
    page = visit(serve())
    expect(page.get_by_text("The bundled model has only 4 million parameters")).to_be_visible()
    page.get_by_role("button", name="What is a KV cache?").click()
    expect(last_answer(page)).to_contain_text("keys and values")
    expect(last_answer(page)).to_contain_text(re.compile(r"\d+ ms from Send to the first token.*\d+ tokens"))
    expect(page.get_by_role("heading", name="Ask the model")).to_be_hidden()


def test_the_line_about_the_server_is_of_now(serve, visit) -> None:
    """The engine view may show the past, slowly."""
    page = visit(serve())
    expect(page.locator("#load")).to_have_text(re.compile(r"^now: \d+ running"))


def test_the_introduction_opens_several_at_once(serve, visit) -> None:
    page = visit(serve())
    page.get_by_label("Conversation").get_by_role("button", name="Several at once").click()
    expect(page.get_by_role("button", name="8 that share a prefix")).to_be_in_viewport()


def test_the_first_answer_says_once_that_its_words_can_be_touched(serve, visit) -> None:
    page = visit(serve())
    hint = page.get_by_text("Point at a word of this answer")
    expect(ask(page, "What is a KV cache?")).to_contain_text("Point at a word of this answer")
    ask(page, "What is a rainbow?")
    expect(hint).to_have_count(1)
    page.reload()
    expect(page.get_by_role("article")).to_have_count(4)
    expect(hint).to_have_count(0)


def test_the_hint_waits_for_an_answer_whose_words_can_be_touched(serve, visit) -> None:
    """One without a name in the engine lights nothing up."""
    page = visit(serve())
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "A stream."}, "finish_reason": "stop"}]})
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    answer = {"content_type": "text/event-stream", "body": body}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer), times=1)
    expect(ask(page, "What is a river?")).to_contain_text("A stream.")
    hint = page.get_by_text("Point at a word of this answer")
    expect(hint).to_have_count(0)
    ask(page, "What is a KV cache?")
    expect(hint).to_have_count(1)


def test_the_rate_of_an_answer_in_one_burst_counts_from_the_question(serve, visit) -> None:
    page = visit(serve())
    shown = page.evaluate("""async () => {
      const { facts } = await import("./static/chat.js");
      const usage = { prompt_tokens: 9, completion_tokens: 70 };
      return facts({ began: 1000, first: 1500, last: 1501, usage, reasons: ["stop"] }, false);
    }""")
    assert "140 tokens/s" in shown, shown


def test_an_answer_streams_and_can_be_stopped(serve, visit) -> None:
    page = visit(serve())
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("ignore_eos").check()
    page.get_by_label("max_tokens").fill("1900")
    page.get_by_role("textbox", name="Message", exact=True).fill("What is a page?")
    page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text(re.compile(r"\w+ \w+ \w+"))
    expect(answer).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer).to_contain_text("stopped")


def test_a_question_is_edited_and_an_answer_made_anew(serve, visit) -> None:
    page = visit(serve())
    ask(page, "What is a KV cache?")
    ask(page, "What is a rainbow?")
    page.get_by_role("button", name="Regenerate", exact=True).click()
    expect(last_answer(page)).to_contain_text("colours")
    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_label("Your question").fill("What is the Moon?")
    page.keyboard.press("Enter")
    expect(last_answer(page)).to_contain_text("Earth")
    expect(page.get_by_role("article")).to_have_count(2)


def test_history_survives_a_reload_until_it_is_deleted(serve, visit) -> None:
    page = visit(serve())
    answer = ask(page, "What is a KV cache?")
    parts = [answer.locator(part).inner_text() for part in (".text", ".facts")]
    page.reload()
    for part, text in zip((".text", ".facts"), parts, strict=True):
        expect(answer.locator(part)).to_have_text(text, use_inner_text=True)
    page.get_by_role("button", name="Clear", exact=True).click()
    page.reload()
    expect(page.get_by_role("article")).to_have_count(0)


def test_an_answer_follows_a_schema_and_is_shown_as_code_that_asks_for_it(serve, visit) -> None:
    page = visit(serve())
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("The answer is").select_option("One of these")
    page.get_by_label("It must follow").fill("green\nblue")
    expect(ask(page, "What is the sky?").locator(".text")).to_have_text(re.compile("^(green|blue)$"))
    page.get_by_role("button", name="Code", exact=True).click()
    expect(page.get_by_label("Code", exact=True)).to_contain_text('"structured_outputs"')
    page.get_by_role("button", name="Python").click()
    expect(page.get_by_label("Code", exact=True)).to_contain_text("extra_body")


def test_a_value_out_of_the_servers_bounds_is_not_sent(serve, visit) -> None:
    """The bounds are those of the server's schema."""
    page = visit(serve())
    page.get_by_role("button", name="Settings", exact=True).click()
    top_p = page.get_by_label("top_p")
    expect(top_p).to_have_attribute("max", "1")
    top_p.fill("1.5")
    page.get_by_role("textbox", name="Message", exact=True).fill("What is a page?")
    page.keyboard.press("Enter")
    expect(top_p).to_be_focused()
    expect(page.get_by_role("article")).to_have_count(0)


def test_what_a_model_writes_is_shown_as_text_and_markdown_never_as_html(serve, visit) -> None:
    page = visit(serve())
    evil = "<img src=x onerror=alert(1)> [a](javascript:alert) **b** `c<b>` https://x\n\n- d\n\n```py\ne = '<i>'\n```"
    evil += f"\n\n{'[' * 200_000} {'`' * 200_000} x\n\n# {'#' * 200_000} x"  # each once took minutes
    evil += f"\n\n{'>' * 9000} q"  # a quote in a quote, too deep for the stack
    page.evaluate(
        "turns => localStorage.setItem('nanoserve.chat', JSON.stringify(turns))",
        [{"role": "user", "texts": ["Say it."]}, {"role": "assistant", "texts": [evil], "facts": []}],
    )
    page.reload()
    text = page.locator(".text")
    expect(text).to_contain_text("<img src=x onerror=alert(1)> [a](javascript:alert) b c<b> https://x")
    assert text.evaluate("e => [...new Set([...e.querySelectorAll('*')].map(e => e.localName))].sort().join()") == (
        "blockquote,button,code,figcaption,figure,h3,li,p,pre,span,strong,ul"
    )


def test_a_key_is_asked_for_and_kept_nowhere(serve, visit) -> None:
    page = visit(serve("--api-key", KEY), faults="401")
    page.get_by_label("This server needs an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("ready")).to_be_visible()
    expect(ask(page, "What is a KV cache?")).to_contain_text("keys and values")
    assert KEY not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    page.reload()
    expect(page.get_by_label("This server needs an API key")).to_have_value("")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_serious(serve, visit, accessible, width: int, theme: str) -> None:
    page = visit(serve(), width=width, theme=theme)
    expect(page.get_by_text("ready")).to_be_visible()
    accessible(page)
    ask(page, "What is a KV cache?")
    for panel in ("Several at once", "Settings", "Code"):
        page.get_by_role("button", name=panel, exact=True).click()
        accessible(page)
    if width == 390:
        page.get_by_role("button", name="Engine", exact=True).click()
        accessible(page)
