"""The viewer of the record, in replays that open from disk. The reader in Python says what the states must be."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from phase5_continuous.extras.record.record_file import read
from phase5_continuous.extras.record.replay import Replay
from phase6_integration.extras.page.replay import replay

RECORD = Path(__file__).parents[1] / "data" / "record.jsonl.gz"
LINES = list(read(RECORD))[1:]
STATES = """() => Array.from({ length: shown.history.end }, (_, index) => {
  const state = shown.history.at(index);
  const requests = Array.from(state.requests.values(), ({ r, state, reason, out, tokens, ids, error }) =>
    [r, { state: reason ?? state, output: out, tokens: [...tokens, ...ids.slice(0, out)], error }]);
  const { tables, tree, contents: tokens, counts } = state;
  return JSON.stringify({ requests, tables: [...tables], tree: [...tree], tokens: [...tokens], counts });
})"""
PICTURES = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>
  done(Array.from(document.querySelectorAll('canvas'), (canvas) => canvas.toDataURL())))))"""


@pytest.fixture
def shown(visit: Any, tmp_path: Path) -> Page:
    return opened(visit, tmp_path)


def opened(visit: Any, folder: Path, *titles: str, **more: Any) -> Page:
    """A replay of the record, under each of these titles."""
    file = folder / "replay.html"
    file.write_text(replay([(title, RECORD.read_bytes()) for title in titles or ("a record",)]), "utf-8")
    page: Page = visit(file.as_uri(), **more)
    expect(page.get_by_role("button", name="Light or dark")).to_be_visible()
    return page


def test_the_state_after_each_line_is_that_of_the_reader(shown: Page) -> None:
    states, reader = shown.evaluate(STATES), Replay()
    reader.apply(next(iter(read(RECORD))))
    assert len(states) == len(LINES)
    for line, state in zip(LINES, map(json.loads, states), strict=True):
        reader.apply(line)
        theirs = {"state", "output", "tokens", "error"}
        requests = {r: {name: getattr(each, name) for name in theirs} for r, each in reader.requests.items()}
        assert dict(state["requests"]) == requests, line
        assert dict(state["tables"]) == reader.tables, line
        assert dict(state["tree"]) == reader.tree, line
        assert dict(state["tokens"]) == reader.tokens, line
        named = [page for table in reader.tables.values() for page in table]
        shared = {page for page in named if named.count(page) > 1}
        cached, pages = reader.tree.keys() - {*named}, reader.header["num_pages"]
        one = len({*named}) - len(shared)
        assert state["counts"] == [pages - len({*named} | reader.tree.keys()), len(cached), one, len(shared)]


def test_steps_back_show_the_same_pictures(shown: Page) -> None:
    """Canvas bytes: also across lines where a state is kept, and after a request was lit up."""
    shown.keyboard.press("End")
    there = [shown.evaluate(PICTURES) for _ in range(3) if shown.keyboard.press("Shift+ArrowLeft") is None]
    assert len({str(pictures) for pictures in there}) == 3
    shown.keyboard.press("Home")
    shown.keyboard.press("n")
    shown.keyboard.press("Escape")
    shown.evaluate(f"shown.player.seek({len(LINES) - 1})")
    again = [shown.evaluate(PICTURES) for _ in range(3) if shown.keyboard.press("Shift+ArrowLeft") is None]
    assert again == there
    for _ in range(20):
        shown.keyboard.press("ArrowRight")
    assert shown.evaluate(PICTURES) == there[0]


def test_a_shared_prefix_is_seen(shown: Page) -> None:
    """Two tables name a page: it is counted, framed in ink, and a click on it names the requests."""
    at, page = next(
        (index, operation[2][0])
        for index, line in enumerate(LINES)
        for operation in line.get("pages", ())
        if operation[0] == "attach"
        and operation[2]
        and shown.evaluate(f"shown.history.at({index}).users[{operation[2][0]}]") > 1
    )
    shown.evaluate(f"shown.player.seek({at})")
    users = shown.evaluate(f"shown.history.at({at}).users[{page}]")
    expect(shown.locator(".v-legend").first).to_contain_text("shared")
    x, y = shown.evaluate("(page) => shown.pages.corner(page)", page)
    pixel = "([x, y]) => [...shown.pages.canvas.getContext('2d').getImageData(x, y, 1, 1).data].join()"
    ink = shown.evaluate("shown.colours.ink.match(/\\d+/g).join() + ',255'")
    shown.evaluate(PICTURES)
    assert shown.evaluate(pixel, [x, y]) == ink
    shown.locator(".v-pages canvas").click(position={"x": x + 5, "y": y + 5})
    expect(shown.locator(".v-details")).to_contain_text(f"shared by {users}")
    shown.mouse.move(0, 0)
    expect(shown.locator(".v-details")).to_contain_text("Prompt")


def test_an_ended_request_keeps_what_it_computed(shown: Page) -> None:
    ends = [(at, r) for at, line in enumerate(LINES) for r, reason, *_ in line.get("done", ()) if reason != "error"]
    for at, r in ends:
        before, after = (
            shown.evaluate(f"shown.history.at({index}).requests.get({r}).computed") for index in (at - 1, at)
        )
        assert after >= before > 0, (at, r)
    at, r = ends[-1]
    shown.evaluate(f"shown.player.seek({at}); shown.select({{ request: {r} }})")
    expect(shown.locator(".v-details")).to_contain_text("page given back")
    expect(shown.locator(".v-details")).not_to_contain_text("no page")
    expect(shown.locator(".v-details")).not_to_contain_text("after 0.00 s")


def test_a_tree_of_many_branches_shows_the_latest(shown: Page) -> None:
    pages, nodes = shown.evaluate("""() => {
      const { state, colours, tree } = shown, count = state.header.num_pages;
      const cached = state.clone();
      cached.tables = new Map();
      cached.users.fill(0);
      cached.tree = new Map(Array.from({ length: count }, (_, page) => [page, null]));
      cached.stored.fill(1);
      tree.draw({ state: cached, colours, lit: null, width: 800, room: 12 * 10, moving: false });
      return [count, tree.nodes.flatMap((node) => node.pages)];
    }""")
    assert pages > 10
    assert nodes == list(range(pages - 9, pages)), "of ten rows, the last says how many are left out"


def test_a_request_that_is_admitted_and_not_computed_yet_has_its_row(shown: Page) -> None:
    """Fault: the time axis read the first span of its lane, and the page stopped."""
    like = next(new for line in LINES for new in line.get("new", ()))
    numbers = admitted, waits = 9001, 9002
    line = {"t": LINES[-1]["t"] + 1, "new": [{**like, "r": r} for r in numbers], "admitted": [[admitted, 0]]}
    shown.evaluate("line => { shown.history.push(line); shown.player.seek(shown.history.end - 1); }", line)
    shown.evaluate(PICTURES)
    rows = dict(shown.evaluate("shown.timeline.rows.map(({ lane, row }) => [lane.r, row])"))
    assert rows.keys() >= {admitted, waits}
    assert rows[admitted] != rows[waits]


def test_the_keyboard_does_all(shown: Page) -> None:
    viewer, where = shown.locator(".viewer"), shown.locator(".v-where b")
    shown.keyboard.press("ArrowRight")
    expect(where).to_have_text(f"step {LINES[1]['step']}")
    shown.keyboard.press("Shift+ArrowRight")
    expect(where).to_have_text(f"step {LINES[11]['step']}")
    shown.keyboard.press("End")
    expect(where).to_have_text(f"step {LINES[-1]['step']}")
    shown.keyboard.press("Home")
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("n")
    expect(shown.locator(".v-title")).to_contain_text("r0")
    shown.keyboard.press("Escape")
    expect(shown.locator(".v-title")).to_have_count(0)
    shown.keyboard.press("?")
    expect(shown.get_by_role("dialog", name="Keys")).to_be_visible()
    shown.keyboard.press("Escape")
    shown.locator(".v-pages canvas").focus()
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("Enter")
    expect(shown.locator(".v-page.v-here small")).to_have_text("0")
    shown.keyboard.press("Escape")
    for panel, title in (("tree", "Page 0"), ("time", "r0")):
        shown.locator(f".v-{panel} canvas").focus()
        shown.keyboard.press("ArrowDown")
        expect(shown.locator(".v-title")).to_contain_text(title)
    viewer.get_by_role("button", name="Pause").or_(viewer.get_by_role("button", name="Play")).focus()
    shown.keyboard.press("]")
    shown.keyboard.press("Space")
    expect(where).not_to_have_text(f"step {LINES[1]['step']}")
    shown.keyboard.press("Space")
    expect(viewer.get_by_role("button", name="Play")).to_be_visible()


def test_a_sentence_leads_to_the_source(shown: Page) -> None:
    lost = [(at, r, by) for at, line in enumerate(LINES) for r, by in line.get("preempted", ())]
    at, r, by = next(each for each in lost if each[2] not in (each[1], None))
    shown.evaluate(f"shown.player.seek({at})")
    said = shown.locator(".v-is-preemption", has_text=f"r{r} preempted: r{by} needs a page and none is free")
    said.get_by_role("button", name="where the source does it").click()
    popover = shown.get_by_role("dialog", name="Where the source does this")
    expect(popover).to_contain_text("phase5_continuous/running.py:")
    expect(popover).to_contain_text("def allocate_slots(self")


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(visit: Any, tmp_path: Path, accessible: Any, width: int, theme: str) -> None:
    page = opened(visit, tmp_path, width=width, theme=theme)
    page.evaluate("shown.player.seek(80); shown.select({ request: shown.state.all('running')[0].r })")
    expect(page.locator(".v-title")).to_be_visible()
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_two_records_move_together(visit: Any, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, "fcfs", "another")
    page.get_by_role("slider").press("End")
    for title in ("fcfs", "another"):
        expect(page.get_by_role("heading", name=title)).to_be_visible()
    assert page.evaluate("shown.views.map((view) => view.index)") == [len(LINES) - 1] * 2
    page.get_by_label("Synchronise by").select_option("step")
    page.get_by_role("button", name="A step back").click()
    assert page.evaluate("shown.views.map((view) => view.index)") == [len(LINES) - 2] * 2


def test_a_live_viewer_keeps_the_last_thousand_lines_and_follows(shown: Page) -> None:
    """A request that decodes for ever, in batches as they come from a server."""
    push = """([first, count]) => globalThis.live.push(Array.from({ length: count }, (_, index) => (
      { step: first + index, t: (first + index) / 100, ms: [0, 0, 5, 0], decode: [0], out: [0] })))"""
    shown.evaluate("""() => {
      const element = document.body.appendChild(document.createElement('div'));
      globalThis.live = new globalThis.shown.constructor(element, { title: 'live' });
      globalThis.live.live = globalThis.live.player.fast = true;
      globalThis.live.push([{ record: 1, page_size: 16, num_pages: 64, shares: true, text: false },
        { step: 0, t: 0, new: [{ r: 0, id: 'a', prompt: 4, max: 9999 }], admitted: [[0, 0]],
          pages: [['attach', 0, []], ['grow', 0, [3]]], prefill: [[0, 0, 4]], out: [0] }]);
    }""")
    for first in range(1, 1400, 50):
        shown.evaluate(push, [first, 50])
    assert shown.evaluate("live.index") == 1400
    base = shown.evaluate("live.history.base")
    assert 1400 - 1000 - 256 <= base <= 1400 - 1000 + 1
    shown.evaluate("live.player.step(-5000)")
    assert shown.evaluate("[live.index, live.state.requests.get(0).out]") == [base, base + 1]
    shown.evaluate(push, [1401, 1])
    assert shown.evaluate("live.index") == base, "it does not follow while it is held"
    shown.evaluate("live.player.speed = 64; live.player.play()")
    assert shown.evaluate("live.player.following") is False, "it goes on from where it was held"
    caught_up = """() => new Promise((done) => {
      const wait = () => (live.player.following ? done(live.index) : setTimeout(wait, 20));
      wait();
    })"""
    assert shown.evaluate(caught_up) == 1401
    shown.evaluate(push, [1402, 1])
    assert shown.evaluate("live.index") == 1402
    shown.evaluate("live.player.step(-10)")
    shown.evaluate("live.player.end()")
    assert shown.evaluate("[live.index, live.state.requests.get(0).out]") == [1402, 1403]
