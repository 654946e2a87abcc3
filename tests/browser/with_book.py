"""The book in a browser: scenes, exercises and the model run in the tab. `make book` has made it."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

QUICK = ("0.2", "4.1")
PLACE = "chapters/book/pages"
WRONG = "return room"
RIGHT = "return pending if pending <= room else max((start + room) // page_size * page_size - start, 0) or room"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="session")
def book(root: Path) -> Iterator[str]:
    """The address of the book, from a plain web server for static files."""
    folder = root / "build" / "book"
    assert (folder / "tab" / "course.json").exists(), "there is no book yet: make book"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def opened(book, visit):
    """Opens a page of the book. It may ask for nothing but files of the book."""
    asked: list[str] = []

    def open_page(path: str, **more: object) -> Page:
        page = visit("about:blank", **more)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{book}/{path}")
        page.set_default_timeout(120_000)
        return page

    yield open_page
    assert [url for url in asked if not url.startswith((book, "blob:", "data:"))] == []


def fits(page: Page, part: str) -> None:
    """Nothing of a part is cut off at the right of the window."""
    right, width = page.evaluate("part => [part.getBoundingClientRect().right, innerWidth]", page.query_selector(part))
    assert right <= width


def test_a_scene_changes_when_a_control_moves(opened, accessible) -> None:
    page = opened("chapters/04_radix.html")
    scene = page.locator(".scene")
    scene.scroll_into_view_if_needed()
    expect(scene).to_have_attribute("data-steps", "86")
    expect(scene.locator(".v-pages")).to_contain_text("shared")
    accessible(page, ".scene")
    fits(page, ".scene")
    page.get_by_role("button", name="Radix tree: where the source does it").click()
    links = [link.get_attribute("href") for link in scene.locator(".v-popover a").all()]
    assert len(links) == 2
    assert all(page.request.get(link or "").ok for link in links)
    page.keyboard.press("Escape")
    scene.locator("select[name=cache]").select_option("paged")
    expect(scene).not_to_have_attribute("data-steps", "86")
    expect(scene.locator(".scene-state")).to_contain_text("with the previous settings: 86 steps")
    before = scene.get_attribute("data-steps")
    scene.locator("input[name=pages]").fill("16")
    expect(scene).not_to_have_attribute("data-steps", before or "")


TOLD = {
    "Pages": "A page table lists",
    "Sharing": "begin with the same 6 pages",
    "The batch": "reads all weights of the model once",
    "Chunks": "the last chunk brings the first token",
    "Preemption": "loses its pages",
}
PYTHON = "performance.getEntriesByType('resource').filter(({ name }) => /pyodide|course.zip/.test(name)).length"


@pytest.mark.parametrize(("path", "part"), [("index", "#try-here"), ("04_radix", ".scene")])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_first_page_and_each_scene_move_before_python_is_loaded(opened, accessible, path, part, width) -> None:
    page = opened(f"chapters/{path}.html", width=width, height=900, reduced_motion="no-preference")
    page.locator(part).scroll_into_view_if_needed()
    expect(page.locator(f"{part} .v-pages canvas")).to_have_attribute("aria-label", re.compile("[1-9] pages shared"))
    accessible(page, part)
    fits(page, part)
    assert page.evaluate(PYTHON) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("chapter", ["02_kernels", "12_scale"])
def test_each_page_of_a_chapter_leads_to_its_notebook_and_its_exercises(opened, chapter) -> None:
    page = opened(f"chapters/{chapter}.html")
    links = page.locator(".beside a")
    expect(links).to_have_text(["Notebook", "Exercises"])
    assert all(page.request.get(f"{page.url}/../{link.get_attribute('href')}").ok for link in links.all())


def test_a_chapter_leads_to_its_notebook_and_its_exercises(opened) -> None:
    page = opened("chapters/04_radix.html")
    links = page.locator(".beside a")
    expect(links).to_have_text(["Notebook", "Exercises"])
    links.last.click()
    expect(page.get_by_role("heading", name="Exercises", exact=True)).to_be_in_viewport()
    links.first.click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert page.url.endswith("04_radix-notebook.html")
    page.locator(".beside").get_by_role("link", name="Chapter 4").click()
    assert page.url.endswith("04_radix.html")


def test_a_guess_unfolds_its_figure_and_is_scored_and_kept(opened, accessible) -> None:
    page = opened("chapters/03_chunked_prefill.html")
    form, figure = page.locator(".guess-form").first, page.get_by_alt_text("What a chunk size does")
    expect(figure).to_be_hidden()
    form.get_by_label("Your guess").fill("1,000,000")
    form.get_by_role("button", name="Unfold").click()
    expect(figure).to_be_visible()
    expect(form).to_contain_text("You said 1000000: ")
    expect(page.locator(".guess-score")).to_contain_text("0 of 1 within a factor of 2")
    accessible(page, ".guess-form")
    page.reload()
    expect(form).to_contain_text("You said 1000000: ")
    form.get_by_label("Your guess").fill(page.locator(".guess").first.get_attribute("data-found") or "")
    form.get_by_role("button", name="Unfold").click()
    expect(page.locator(".guess-score")).to_contain_text("1 of 1 within a factor of 2")


def test_the_model_answers_in_the_tab_as_on_a_server(opened, accessible, serve) -> None:
    page = opened(f"{PLACE}/try.html")
    page.get_by_role("button", name="What is a KV cache?").click()
    answer = page.locator(".try-said")
    place = page.locator("#try-here")
    expect(place).to_have_attribute("data-answered", "1", timeout=120_000)
    body = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0, "max_tokens": 96}
    asked = page.request.post(f"{serve()}/v1/chat/completions", data={"model": "tiny_chat", **body})
    assert answer.inner_text() == asked.json()["choices"][0]["message"]["content"]
    accessible(page, "#try-here")
    fits(page, "#try-here")
    page.get_by_role("button", name="All five at once").click()
    expect(page.locator(".v-pages li", has_text="shared")).not_to_have_text("shared 0")
    expect(place).to_have_attribute("data-answered", "6")


WATCH = """() => {
  const said = document.querySelector("#try-here .v-said");
  window.seen = "";
  new MutationObserver(() => (window.seen += said.textContent)).observe(said, { subtree: true, childList: true });
}"""


def test_questions_are_followed_slowly_replayed_and_fill_the_pool(opened) -> None:
    page = opened(f"{PLACE}/try.html")
    place, again = page.locator("#try-here"), page.get_by_role("button", name="Replay")
    expect(again).to_be_hidden()
    expect(place.locator(".try-stage[data-recorded]")).to_be_visible()
    page.get_by_role("button", name="Fill the pool").click()
    expect(place.locator(".v-about")).to_contain_text("64 tokens a step", timeout=120_000)  # no longer the recorded run
    expect(place.locator(".try-stage[data-recorded]")).to_have_count(0)
    expect(page.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "false")
    page.evaluate(WATCH)
    expect(place).to_have_attribute("data-answered", "10")
    page.wait_for_function("seen.includes('preempted: ') && seen.includes('evicted')")
    again.click()
    expect(place.locator(".v-pages li", has_text="one request")).not_to_have_text("one request 0")
    page.get_by_role("button", name="Fill the pool").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(place).to_have_attribute("data-answered", "20")


WORKER = """globalThis.Worker = class {
  postMessage({ id, call, args: [number, messages] }) {
    const say = (data) => setTimeout(() => this.onmessage({ data }));
    const tell = (name, value) => say({ tell: name, value });
    if (call !== "ask") return say({ id, result: null });
    if (messages.at(-1)[1] === "Too long") return say({ id, error: "the prompt is too long" });
    tell("lines", [{ record: 1, page_size: 16, num_pages: 8, shares: true, text: false },
      { step: 0, t: 0, new: [{ r: 0, id: "a", prompt: 4, max: 1 }], admitted: [[0, 0]], pages: [["attach", 0, []]] }]);
    tell("text", [number, "An answer.", "stop"]);
    say({ id, result: null });
  }
}"""


def test_replay_is_there_after_a_question_that_failed(root: Path, visit) -> None:
    """With a worker that answers at once, so that nothing of the book need be built."""
    folders = {"/_static/tab/": "chapters/book/static/tab", "/tab/": "phase6_integration/extras/page/static"}

    def file(route: Route) -> None:
        path = route.request.url.removeprefix("http://book.test")
        folder = next((folder for start, folder in folders.items() if path.startswith(start)), None)
        found = root / folder / path.partition("/tab/")[2] if folder else None
        body = "{}" if path.endswith(".json") else "<!doctype html><main></main>"
        if found and found.exists():
            route.fulfill(path=found)
        else:
            route.fulfill(body=body, content_type="application/json" if body == "{}" else "text/html")

    page = visit("about:blank")
    page.route("http://book.test/**", file)
    page.add_init_script(WORKER)
    page.goto("http://book.test/")
    page.evaluate("import('/_static/tab/try.js').then(({ begin }) => begin(document.querySelector('main')))")
    question, again = page.get_by_label("Your message"), page.get_by_role("button", name="Replay")
    failed, answered = ("Too long", "too long"), ("Hi", "An answer.")
    for (asked, said), replays in ((failed, False), (answered, True), (failed, True)):
        question.fill(asked)
        question.press("Enter")
        expect(page.locator(".try-answer").last).to_contain_text(said)
        expect(again).to_be_visible(visible=replays)
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_disabled()


@pytest.mark.parametrize("width", [390, 1440])
def test_the_tour_goes_through_the_recorded_run_without_python(opened, accessible, width) -> None:
    page = opened("chapters/index.html", width=width, height=844)
    page.get_by_role("button", name="Take the tour").click()
    tour, engine = page.get_by_role("region", name="Tour"), page.locator(".try-stage")
    for title, told in TOLD.items():
        expect(tour).to_contain_text(f"of 5: {title}")
        tour.locator(".choices button").first.click()
        expect(tour.get_by_role("status")).to_contain_text(told)
        expect(engine).to_be_in_viewport()
        covered = "([tour, engine]) => engine.getBoundingClientRect().bottom - tour.getBoundingClientRect().top"
        if title == "Pages":
            if width == 390:
                assert page.evaluate(covered, [tour.element_handle(), engine.element_handle()]) < 40  # at most its head
            accessible(page, ".try-tour")
        tour.locator(".first").click()
    expect(tour).to_be_hidden()
    assert page.evaluate(PYTHON) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_on_a_phone_the_engine_stays_in_sight_above_the_chat(opened) -> None:
    page = opened("chapters/index.html", width=390, height=844)
    page.locator(".try-form").evaluate("form => form.scrollIntoView({ block: 'end' })")
    expect(page.locator(".try-stage .v-pages canvas")).to_be_in_viewport(ratio=0.5)


def test_the_first_page_leads_on_to_the_chapters(opened) -> None:
    page = opened("chapters/index.html")
    expect(page.get_by_role("main").get_by_role("link", name="chapter 0", exact=False).first).to_have_attribute(
        "href", "00_request.html"
    )
    for heading in ("The plan", "life of a request"):
        page.locator(".next-page").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(heading)


@pytest.fixture(scope="module")
def judged(root: Path, pytestconfig: pytest.Config):
    """What the command says of the answers to an exercise."""
    python = Path(pytestconfig.getoption("--serve").split()[0]).parent / "python"

    def judge(id: str) -> list[dict]:
        command = [python, "-m", "tests.browser.judged", id]
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return json.loads(found.stdout)

    return judge


PLACES = {0: range(1, 8), 1: range(1, 4), 3: range(1, 5), 4: range(1, 11), 5: range(1, 7), 11: range(2, 7)}
IN_TAB = [f"{chapter}.{n}" for chapter, numbers in PLACES.items() for n in numbers]


@pytest.mark.parametrize("id", [pytest.param(id, marks=() if id in QUICK else pytest.mark.slow) for id in IN_TAB])
def test_an_exercise_is_judged_in_the_tab_as_by_the_command(id: str, opened, judged) -> None:
    page = opened(f"{PLACE}/exercises.html#{id}")
    expect(page.locator(".cm-content")).to_be_visible()
    module = page.evaluate_handle("() => import(new URL('../../../_static/tab/engine.js', location))")
    engine = module.evaluate_handle("({ Engine }) => new Engine()")
    for case in judged(id):
        told = engine.evaluate("(engine, [id, text]) => engine.call('check', id, text)", [id, case["text"]])
        assert {key: told[key] for key in case["told"]} == case["told"], case["kind"]


def test_an_answer_is_written_judged_and_kept(opened, accessible) -> None:
    page = opened(f"{PLACE}/exercises.html#3.1")
    page.get_by_role("button", name="Hint 1 of 3").click()
    expect(page.get_by_text("At most how many tokens can be computed")).to_be_visible()
    for before, answer, expected in (("raise NotImpl", WRONG, "failed"), (WRONG, RIGHT, "passed: 13 of 13 tests pass")):
        page.locator(".cm-line", has_text=before).first.click(click_count=3)
        page.keyboard.insert_text(f"    {answer}\n")
        page.get_by_role("button", name="Check").click()
        expect(page.locator(".ex-result")).to_contain_text(expected, timeout=120_000)
    accessible(page, "#exercises-here")
    fits(page, "#exercises-here")
    page.reload()
    expect(page.get_by_role("link", name="✓ 3.1")).to_be_visible()
    expect(page.locator(".cm-line", has_text=RIGHT)).to_be_visible()
