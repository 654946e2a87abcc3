"""The engine as the page shows it, live: its pages, who may watch, and whose text is shown."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, Response, Route, expect

KEY = "sk-of-the-browser"
SMALL = ("--kv-cache-pages", "96")


@pytest.fixture
def watched(serve, visit):
    """The page of a small server, with the engine's own work in view at the engine's own speed."""

    def open_page(*flags: str, **more: object) -> Page:
        page = visit(serve(*(flags or SMALL)), **more)
        live(page)
        return page

    return open_page


def live(page: Page) -> None:
    """Give the engine something to do, so that it takes the place of the recorded run, and follow it at once."""
    url, button = page.url.rstrip("/"), page.get_by_role("button", name="Live", exact=True)
    expect(page.get_by_text("A recorded run")).to_be_visible()
    asked_until(button.is_visible, url, "What is iron?")
    button.click()


def asked_until(seen: Callable[[], bool], url: str, question: str) -> None:
    """Ask again and again: an answer may end before the stream is open."""
    for _ in range(100):
        if seen():
            return
        ask(url, question)
    raise AssertionError("the page does not show what the engine does")


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
    panel = page.get_by_role("toolbar").get_by_role("button", name="Several at once")
    if panel.get_attribute("aria-expanded") != "true":
        panel.click()
    page.get_by_role("button", name=name).click()


def test_the_map_changes_with_a_request_and_keeps_what_it_computed(watched) -> None:
    page = watched()
    seen(page, " 0 of one request")
    before = counts(page)
    page.evaluate(ASK, {"messages": [{"role": "user", "content": "What is the Sun?"}], "max_tokens": 600, **ENDLESS})
    seen(page, r" [1-9]\d* of one request")
    seen(page, " 0 of one request")
    after = counts(page)
    assert sum(after.values()) == sum(before.values()) == 96
    assert after["cached"] > before["cached"]
    assert after["free"] < before["free"]


def test_requests_that_begin_alike_share_pages(watched) -> None:
    page = watched()
    start(page, "8 that share a prefix")
    seen(page, r"[1-9]\d* pages shared")
    expect(page.get_by_text("8 of 8 have ended")).to_be_visible()
    seen(page, " 0 pages shared")


def test_many_short_questions_are_distinct_and_known_to_the_model(serve, visit) -> None:
    page = visit(serve())
    start(page, "32 short ones")
    expect(page.get_by_text("32 of 32 have ended")).to_be_visible()
    text = "rows => rows.map((row) => row.querySelector('b').textContent + row.lastChild.textContent)"
    rows = page.locator("#crowd-list li").evaluate_all(text)
    asked, answers = zip(*(row.split("?", 1) for row in rows), strict=True)
    assert len(set(asked)) == 32
    for question, answer in zip(asked, answers, strict=True):
        thing = question.removeprefix("What is ")
        assert answer.strip().lower().startswith(f"{thing.lower()} is "), (question, answer)


# In one call: a busy browser would need longer for two than the engine for a long answer.
ABORT = """() => {
  const running = /[1-9]\\d* of one request/.test(document.querySelector(".v-pages canvas").getAttribute("aria-label"));
  if (running) document.getElementById("abort-all").click();
  return running;
}"""


def test_an_abort_frees_pages(watched) -> None:
    page = watched()
    start(page, "A long one")
    page.wait_for_function(ABORT)
    expect(page.get_by_text("Aborted; 0 of 1 had ended")).to_be_visible()
    seen(page, " 0 of one request")


def test_the_page_opens_the_stream_again_with_what_the_engine_has_by_then(serve, visit) -> None:
    url = serve(*SMALL)
    page = visit(url)
    ended = "() => document.querySelector('.v-said').textContent.includes('ends after 8 tokens')"
    found = []
    for _ in range(2):
        expect(page.get_by_text("A recorded run")).to_be_visible()
        asked_until(page.get_by_text("A recorded run").is_hidden, url, "What is a comet?")
        page.get_by_role("button", name="Live", exact=True).click()
        page.wait_for_function(ended)
        found.append(counts(page))
        page.reload()
    first, again = found
    assert first == again, "the second answer's pages are those of the first, which the engine still has"
    assert first["cached"] > 0


# What is seen at once, and slowly enough.


def step(page: Page) -> int:
    """The step that is shown."""
    found = re.search(r"step (\d+)", page.locator(".v-where").inner_text())
    return int(found[1]) if found else -1


def test_a_recorded_run_plays_until_the_engine_does_something(serve, visit) -> None:
    page = visit(serve("--demo", "--seed", "1"), reduced_motion="no-preference")
    expect(page.get_by_text("A recorded run")).to_be_visible()
    seen(page, r"[1-9]\d* pages shared")
    page.get_by_role("button", name="What is a KV cache?").click()
    expect(page.get_by_text("A recorded run")).to_be_hidden()
    expect(pool(page)).to_have_attribute("aria-label", re.compile("1 of one request"))


def test_the_recorded_run_begins_where_requests_share_pages(serve, visit) -> None:
    page = visit(serve("--demo", "--seed", "1"), reduced_motion="no-preference")
    expect(pool(page)).to_be_visible()
    assert counts(page)["shared"] > 0
    expect(page.locator(".v-moment")).to_have_text(re.compile("share 6 pages: they begin alike"))
    still = visit(serve("--demo", "--seed", "1"))
    expect(still.locator(".v-said")).to_contain_text("tokens are cached")


def test_a_crowd_is_followed_at_sixteen_steps_a_second_and_replayed(serve, visit) -> None:
    """The page's clock is the test's, so that each step is seen."""
    page = visit(serve("--demo"))
    page.clock.install()
    start(page, "8 that share a prefix")
    for _ in range(40):
        page.clock.run_for(50)
        if page.get_by_text("8 of 8 have ended").count():
            break
    page.clock.run_for(500)
    expect(page.locator(".v-slowed")).to_have_text(re.compile(r"^[\d.]+ m?s, slowed \d+ times$"))
    page.clock.run_for(1500)  # the first sharing is held
    expect(page.locator(".v-moment")).to_be_empty()
    before = step(page)
    page.clock.run_for(1000)
    assert 8 <= step(page) - before <= 17
    page.get_by_role("button", name="Live", exact=True).click()
    page.clock.run_for(100)
    last = step(page)
    expect(page.locator(".v-slowed")).to_be_empty()
    page.get_by_role("button", name="Replay", exact=True).click()
    page.clock.run_for(500)
    assert step(page) < last
    page.clock.resume()


def test_a_small_pool_fills_so_that_requests_are_preempted_and_pages_evicted(watched) -> None:
    page = watched("--demo")
    expect(page.get_by_text("Its pool is small")).to_be_visible()
    start(page, "Fill the pool")
    expect(page.get_by_text("10 of 10 have ended")).to_be_visible()
    page.get_by_label("Speed").select_option("2")
    for told in ("evicted", "preempted"):
        page.get_by_role("button", name="Replay", exact=True).click()
        page.wait_for_function("told => document.querySelector('.v-said').textContent.includes(told)", arg=told)


def test_a_long_one_fits_a_small_pool(watched) -> None:
    page = watched("--demo")
    start(page, "A long one")
    expect(page.get_by_text("1 of 1 have ended")).to_be_visible()


# The steps that the viewer shows, kept.
STEPS = """() => {
  const where = document.querySelector(".v-where");
  window.steps = [];
  new MutationObserver(() => window.steps.push(parseInt(where.textContent.slice(5)))).observe(where, {childList: true});
}"""


def test_the_tour_asks_and_shows_five_mechanisms(serve, visit, accessible) -> None:
    """Each stop is later in the run, lights the panels that it speaks of, and plays the steps that answer."""
    page = visit(serve("--demo"))
    page.get_by_role("button", name="Take the tour").click()
    tour, lit = page.get_by_role("region", name="Tour"), page.locator(".v-panel:not(.v-dim) h3")
    before = -1
    stops = {
        "Pages": (["Pages"], "Into any free page", "decodes a token"),
        "Sharing": (["Pages", "Prefix tree"], "None", r"[1-9]\d* of its \d+ tokens are cached"),
        "The batch": (["Batch over time"], "One for all", "8 requests decode a token each"),
        "Chunks": (["Batch over time"], "After its last chunk", r"computes \d+ prompt tokens(?!, \d+ are left)"),
        "Preemption": (["Pages", "Prefix tree", "Batch over time"], "It takes the pages of the last", "preempted"),
    }
    for number, (title, (panels, right, said)) in enumerate(stops.items(), 1):
        expect(tour).to_contain_text(f"{number} of 5: {title}")
        expect(lit).to_contain_text(panels)
        assert step(page) > before
        before = step(page)
        accessible(page, "#tour")
        page.evaluate(STEPS)
        tour.get_by_role("button", name=right).click()
        expect(tour.get_by_role("status")).to_contain_text("Yes. ")
        expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
        expect(page.locator(".v-said")).to_contain_text(re.compile(said))
        assert min(page.evaluate("window.steps")) >= before, "it plays on from where it asks"
        tour.get_by_role("button", name="To the engine" if number == len(stops) else "Next").click()
    expect(tour).to_be_hidden()
    expect(page.locator(".viewer")).to_be_focused()


def test_a_wrong_choice_is_marked_and_so_is_the_right_one(serve, visit) -> None:
    """In words, for readers who cannot tell the colours apart or use a screen reader."""
    page = visit(serve("--demo"))
    page.get_by_role("button", name="Take the tour").click()
    tour = page.get_by_role("region", name="Tour")
    tour.get_by_role("button", name="Over its oldest tokens").click()
    expect(tour.get_by_role("status")).to_contain_text("No. ")
    expect(tour.get_by_role("button", name="wrong: Over its oldest tokens")).to_be_visible()
    expect(tour.get_by_role("button", name="right: Into any free page")).to_be_visible()


def test_the_tour_leaves_a_phone_its_lanes(serve, visit) -> None:
    page = visit(serve("--demo"), width=390, height=844)
    button = page.get_by_role("button", name="Take the tour")
    expect(button).to_be_in_viewport(ratio=1)
    button.click()
    tour, engine = page.get_by_role("region", name="Tour"), page.get_by_role("region", name="Engine")
    for number in range(1, 5):
        tour.locator(".choices button").first.click()
        expect(tour.get_by_role("button", name="Next")).to_be_in_viewport(ratio=1)
        assert page.evaluate("[scrollY, document.documentElement.scrollHeight]") == [0, 844]
        if number in (3, 4):  # which speak of lanes
            lanes, seen = page.locator(".v-time canvas").bounding_box(), engine.bounding_box()
            assert lanes is not None
            assert seen is not None
            assert seen["y"] <= lanes["y"] <= seen["y"] + seen["height"] - 170, "an axis and nine lanes"
        tour.get_by_role("button", name="Next").click()


def test_a_pool_of_the_real_size_is_not_filled(serve, visit) -> None:
    page = visit(serve())
    expect(page.get_by_text("ready")).to_be_visible()
    start(page, "8 that share a prefix")
    expect(page.get_by_role("button", name="Fill the pool")).to_be_disabled()
    expect(page.get_by_text("Its pool is small")).to_be_hidden()


# Text, tokens and pages are one thing.

TOUCHED = "() => Array.from(CSS.highlights.get('touched'), String)"
WORD = """word => {
  const node = document.querySelector("article .text p").firstChild, at = node.data.indexOf(word), range = new Range();
  range.setStart(node, at);
  range.setEnd(node, at + word.length);
  const { left, top, width, height } = range.getBoundingClientRect();
  return [left + width / 2, top + height / 2];
}"""


def test_a_word_and_its_page_and_step_light_each_other_up(serve, visit) -> None:
    page = visit(serve("--demo"))
    page.get_by_role("button", name="What is a KV cache?").click()
    expect(page.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="Live", exact=True).click()
    chip = page.locator(".chip").first
    expect(chip).to_have_text(re.compile(r"^r\d+$"))
    page.mouse.move(*page.evaluate(WORD, "values"))
    expect(chip).to_have_class("chip lit")
    (touched,) = page.evaluate(TOUCHED)
    assert "values" in touched, "the word's page is highlighted in the answer"
    requests = page.get_by_role("region", name="Requests")
    expect(requests.locator(".v-token.v-here")).to_have_text(" values")
    expect(requests.locator(".v-page.v-here")).to_contain_text(touched.split(" ", 1)[1])
    cell = requests.locator(".v-page.v-here small")
    expect(cell).to_contain_text("cached")
    number = int(cell.inner_text().split(" ")[0])
    page.mouse.move(5, 5)
    assert page.evaluate(TOUCHED) == []
    canvas = page.locator(".v-pages canvas")
    canvas.focus()
    page.keyboard.press("Escape")
    for _ in range(number + 1):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("() => [...CSS.highlights.get('touched')].length == 1")
    assert page.evaluate(TOUCHED) == [touched], "and the page highlights its words"


# What the viewer says, kept: a step is shown for an eighth of a second, and a busy browser asks for it less often.
KEPT = """() => {
  const said = document.querySelector(".v-said");
  window.kept = [];
  new MutationObserver(() => window.kept.push(said.textContent)).observe(said, {childList: true});
}"""


def test_an_answer_is_played_in_the_engine_from_its_admission_on(serve, visit) -> None:
    page = visit(serve("--demo"))
    page.get_by_role("button", name="What is a KV cache?").click()
    page.get_by_role("button", name="In the engine").click()
    expect(page.locator(".v-title")).to_contain_text(re.compile(r"^r\d+"))
    page.get_by_role("button", name="To the end").click()
    expect(page.locator(".v-said")).not_to_contain_text("admitted")
    page.evaluate(KEPT)
    page.get_by_role("button", name="In the engine").click()
    page.wait_for_function("() => window.kept.some((said) => /r\\d+ admitted/.test(said))")


def test_every_name_on_the_time_axis_is_explained(serve, visit) -> None:
    page = visit(serve("--demo"))
    for title in (
        "Policy",
        "Token budget",
        "Throughput",
        "TTFT, time to first token",
        "ITL, inter-token latency",
        "Hit rate",
        "Queue",
    ):
        page.get_by_role("button", name=f"{title}: where the source does it").click()
        expect(page.get_by_role("dialog", name="Where the source does this")).to_contain_text("The book: ")
        page.keyboard.press("Escape")


def test_chat_and_engine_are_seen_at_once_on_a_phone(serve, visit) -> None:
    page = visit(serve("--demo"), width=390, height=844)
    engine, chat = page.get_by_role("region", name="Engine").bounding_box(), page.locator("#chat").bounding_box()
    assert engine is not None
    assert chat is not None
    assert engine["height"] > 250
    assert engine["y"] + engine["height"] <= chat["y"]
    assert chat["y"] + chat["height"] <= 844
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator(".viewer").focus()
    for _ in range(60):  # what is said fits, and ends in an ellipsis where it does not
        page.keyboard.press("ArrowRight")
        page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        cut, signed = page.locator(".v-said").evaluate("""list => {
          const sentences = Array.from(list.querySelectorAll(".v-sentence"));
          const cut = sentences.filter((each) => each.scrollWidth > each.clientWidth);
          const signed = cut.every((each) => getComputedStyle(each).textOverflow === "ellipsis");
          return [list.scrollHeight > list.clientHeight, signed];
        }""")
        assert (cut, signed) == (False, True), page.locator(".v-said").inner_text()


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_an_answer_and_the_list_of_a_crowd_are_both_reached(serve, visit, width: int, height: int) -> None:
    page = visit(serve("--demo"), width=width, height=height)
    page.get_by_role("button", name="What is a KV cache?").click()
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_have_attribute("aria-busy", "false")
    start(page, "Fill the pool")
    expect(page.get_by_text("10 of 10 have ended")).to_be_in_viewport()
    expect(page.locator("#crowd-note")).to_contain_text("on purpose")
    expect(page.locator("#crowd-note")).to_be_visible()
    for part in (answer.locator("p").first, page.locator("#crowd-list li").last):
        part.scroll_into_view_if_needed()
        expect(part).to_be_in_viewport(ratio=1)
    assert page.evaluate("[scrollY, document.documentElement.scrollHeight]") == [0, height]


def test_a_word_that_is_touched_does_not_hide_the_pages_of_a_phone(serve, visit) -> None:
    page = visit(serve("--demo"), width=390, height=844)
    page.get_by_role("button", name="What is a KV cache?").click()
    expect(page.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="Live", exact=True).click()
    expect(page.locator(".chip").first).to_have_text(re.compile(r"^r\d+$"))
    page.mouse.move(*page.evaluate(WORD, "values"))
    expect(page.locator(".v-token.v-here")).to_have_text(" values")
    hit = "e => { const { x, y } = e.getBoundingClientRect(); return document.elementFromPoint(x + 40, y + 20) === e; }"
    assert page.locator(".v-pages canvas").evaluate(hit)


# Who may watch, and what.


def request(url: str, path: str, key: str | None, body: object = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return urllib.request.Request(url + path, json.dumps(body).encode() if body else None, headers)


def ask(url: str, question: str, key: str | None = None) -> None:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
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


def opened(response: Response) -> bool:
    """A request that ends before the record is opened is not in it."""
    return response.url.endswith("/record") and response.ok


def test_a_key_that_is_given_before_the_record_is_refused_opens_the_record(serve, visit) -> None:
    url = serve("--api-key", KEY)
    page = visit("about:blank", faults="401")
    late: list[Route] = []
    page.route("**/record", lambda route: late.append(route), times=1)
    page.goto(url)
    page.get_by_label("This server needs an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("ready", exact=True)).to_be_visible()
    with page.expect_response(opened):
        late[0].continue_()  # it was sent without the key
    start(page, "32 short ones")
    expect(page.locator("#recorded")).to_be_hidden()


def test_with_keys_the_page_shows_the_text_of_its_own_requests_only(serve, visit) -> None:
    url = serve("--api-key", KEY)
    page = visit(url, faults="401")
    page.get_by_label("This server needs an API key").fill(KEY)
    with page.expect_response(opened):
        page.keyboard.press("Enter")
    expect(pool(page)).to_be_visible()
    page.get_by_role("button", name="How does prefix caching work?").click()
    page.get_by_role("button", name="In the engine").click()
    requests = page.get_by_role("region", name="Requests")
    expect(requests).to_contain_text("How does prefix caching work?")
    expect(requests).to_contain_text("computes only the rest")
