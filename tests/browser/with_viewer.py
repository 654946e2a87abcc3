"""The viewer of the record, in replays that open from disk. The reader in Python says what the states must be."""

import json
import re
from collections import Counter
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


# What is seen at a glance.

PAUSED = """index => new Promise((done) => {
  shown.player.seek(index);
  requestAnimationFrame(() => requestAnimationFrame(done));
})"""
# The text that a canvas draws while a line is shown: what, where, in which colour, and the colours that are below it.
TEXTS = """([panel, index]) => new Promise((done) => {
  const context = shown[panel].canvas.getContext("2d"), draw = context.fillText.bind(context), texts = [];
  context.fillText = (text, x, y, ...more) => {
    const { width } = context.measureText(text), before = { center: width / 2, right: width };
    const left = x - (before[context.textAlign] ?? 0);
    const { data } = context.getImageData(left, y - 4, Math.max(1, width), 8), below = new Set();
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) below.add(data.slice(at, at + 3).join());
    texts.push({ text, left, right: left + width, y, colour: context.fillStyle, below: [...below] });
    draw(text, x, y, ...more);
  };
  if (panel === "pages") shown.pages.drawn = null;
  shown.player.seek(index);
  requestAnimationFrame(() => requestAnimationFrame(() => { delete context.fillText; done(texts); }));
})"""


def held(page: Page) -> str:
    return page.locator(".v-moment").inner_text()


def played(page: Page, milliseconds: int) -> str:
    """What is held next."""
    for _ in range(200):
        if said := held(page):
            return said
        page.clock.run_for(milliseconds)
    raise AssertionError("nothing was held")


def test_what_is_shared_is_said_of_the_pages_that_the_same_requests_hold(shown: Page) -> None:
    """Requests that were found in the cache may share other pages with others. A replay from that line on holds it."""
    reader, groups = Replay(), Counter[bool]()
    reader.apply(next(iter(read(RECORD))))
    for at, line in enumerate(LINES):
        reader.apply(line)
        found = [r for r, cached in line.get("admitted", ()) if cached]
        if not found or line.get("preempted"):
            continue
        holders: dict[int, list[int]] = {}
        for r, table in reader.tables.items():
            for page in table:
                holders.setdefault(page, []).append(r)
        shared = {page: holders[page] for r in found for page in reader.tables[r] if len(holders[page]) > 1}
        moment = shown.evaluate(
            """at => {
          shown.player.playFrom(at);
          const { moment } = shown.player;
          return moment && [moment.text, [...moment.requests], [...moment.pages]];
        }""",
            at,
        )
        if not shared:
            assert moment is None
            continue
        text, requests, pages = moment
        alike = [page for page, its in shared.items() if sorted(its) == sorted(requests)]
        assert sorted(pages) == sorted(alike) != []
        assert f" share {len(pages)} page" in text
        groups[len(pages) < len(shared)] += 1
    assert groups[True], "some share other pages with others"
    assert groups[False]


def test_a_burst_of_a_slow_engine_is_held_once(shown: Page) -> None:
    """The view has shown each line before the next comes. After an idle engine, it is held again."""
    shown.clock.install()
    shown.evaluate("""() => {
      const element = document.body.appendChild(document.createElement('div'));
      globalThis.live = new globalThis.shown.constructor(element, { title: 'live' });
      globalThis.live.live = true;
      globalThis.live.push([{ record: 1, page_size: 16, num_pages: 64, shares: true, text: false },
        { step: 0, t: 0, new: [{ r: 0, id: 'a', prompt: 16, max: 99 }], admitted: [[0, 0]],
          pages: [['attach', 0, []], ['grow', 0, [0]], ['store', null, [0]]], prefill: [[0, 0, 16]], out: [0] }]);
    }""")

    def holds(line: dict[str, Any]) -> bool:
        shown.evaluate("line => live.push([line])", line)
        shown.clock.run_for(500)
        held = bool(shown.evaluate("live.player.moment !== null"))
        shown.clock.run_for(2500)
        assert shown.evaluate("[live.player.moment, live.index]") == [None, line["step"]]
        return held

    def joins(step: int) -> dict[str, Any]:
        new = {"r": step, "id": f"{step}", "prompt": 20, "max": 99}
        pages = [["attach", step, [0]], ["grow", step, [step]]]
        return {"step": step, "t": step, "new": [new], "admitted": [[step, 16]], "pages": pages, "out": [step]}

    assert [holds(joins(step)) for step in (1, 2, 3)] == [True, False, False]
    done = {"done": [[r, "stop"] for r in range(4)], "pages": [["free", r] for r in range(4)]}
    assert not holds({"step": 4, "t": 4, **done})
    assert [holds(joins(step)) for step in (5, 6)] == [False, True], "one alone shares with no request"


def test_slow_playing_holds_at_the_first_preemption_and_says_it_large(shown: Page) -> None:
    """For a second and a half, with the pages that the victim alone had and its lane lit; the next go by."""
    shown.clock.install()
    all_lost = ((at, line.get("preempted", ())) for at, line in enumerate(LINES))
    lost = [(at, pairs) for at, pairs in all_lost if any(by is not None for _, by in pairs)]
    (at, [(r, _), *_]), (later, _) = lost[0], lost[1]
    tables = dict(shown.evaluate(f"[...shown.history.at({at - 1}).tables]"))
    uses = Counter(page for table in tables.values() for page in table)
    own = [page for page in tables[r] if uses[page] == 1]
    assert 0 < len(own) < len(tables[r]), "it shares some"
    shown.evaluate(f"shown.player.seek({at - 3}); shown.player.told = [{{ mechanism: 'prefix' }}]; shown.player.play()")
    said = played(shown, 50)
    assert shown.evaluate("shown.index") == at
    back = f"{len(own)} pages go" if len(own) > 1 else "1 page goes"
    assert said == f"r{r} is preempted: the pool is full, and {back} back"
    lit = shown.evaluate("(({ requests, pages }) => [[...requests], [...pages]])(shown.lit(shown.state))")
    assert lit == [[r], own]
    shown.clock.run_for(1200)
    assert shown.evaluate("shown.index") == at
    shown.clock.run_for(600)
    assert held(shown) == ""
    for _ in range(later - at):
        shown.clock.run_for(250)
        assert held(shown) == "", "one of a burst is held, and the others go by"
    assert shown.evaluate("shown.index") > later


@pytest.mark.parametrize("ended", ["shown.player.pause()", "shown.player.step(1)", "shown.player.playFrom(0, 9)"])
def test_what_is_held_is_let_go_by_any_control(shown: Page, ended: str) -> None:
    shown.clock.install()
    shown.evaluate("shown.player.play()")
    assert "share" in played(shown, 100)
    shown.evaluate(ended)
    shown.clock.run_for(100)
    assert held(shown) == ""


def test_fast_playing_never_holds(shown: Page) -> None:
    shown.clock.install()
    shown.evaluate("shown.player.speed = 16; shown.player.play()")
    for _ in range(len(LINES)):
        shown.clock.run_for(100)
        assert held(shown) == ""
    assert not shown.evaluate("shown.player.playing")


def test_the_slider_moves_the_record_while_it_plays(shown: Page) -> None:
    """Fault: pausing moved the slider back before it was read."""
    shown.evaluate("shown.player.play()")
    shown.get_by_role("slider").evaluate("slider => { slider.value = 50; slider.dispatchEvent(new Event('input')); }")
    assert shown.evaluate("[shown.player.playing, shown.index]") == [False, 50]


def test_each_bar_begins_with_the_name_of_its_request(shown: Page) -> None:
    """Rows and colours are used again."""
    named = set()
    for at in (*range(30, len(LINES), 40), len(LINES) - 1):
        bars = shown.evaluate(TEXTS, ["timeline", at])
        left, top, pitch = shown.evaluate("[shown.timeline.axis.labels, shown.timeline.top, shown.timeline.pitch]")
        rows = shown.evaluate("shown.timeline.rows.map(({ lane, row }) => [lane.r, row])")
        for each in bars:
            if each["text"].startswith("r") and each["left"] > left:
                r, row = int(each["text"][1:]), (each["y"] - top) // pitch
                assert [r, row] in rows
                named.add(r)
    steps = Counter(r for line in LINES for r in line.get("decode", ()))
    assert named >= {r for r, count in steps.items() if count > 8}, "all but the shortest"


@pytest.mark.parametrize("width", [390, 1440])
def test_no_number_of_the_time_axis_is_cut(visit: Any, tmp_path: Path, width: int) -> None:
    page = opened(visit, tmp_path, width=width)
    for at in range(0, len(LINES), 7):
        for each in page.evaluate(TEXTS, ["timeline", at]):
            assert each["right"] <= page.evaluate("shown.timeline.canvas.clientWidth") + 0.5, each


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_numbers_on_pages_can_be_read(visit: Any, tmp_path: Path, theme: str) -> None:
    """Also where a page is half filled, or has the colours of two requests: 4.5 to 1 against all that is below them."""
    page = opened(visit, tmp_path, theme=theme)
    for at in range(10, len(LINES), 20):
        for each in page.evaluate(TEXTS, ["pages", at]):
            colour = ",".join(str(int(each["colour"][at : at + 2], 16)) for at in (1, 3, 5))
            assert all(contrast(colour, below) >= 4.5 for below in each["below"]), each


def test_blocks_of_the_tree_never_overlap_while_it_changes(visit: Any, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, reduced_motion="no-preference")
    overlaps = page.evaluate(
        """async (count) => {
      const { tree } = shown, found = [];
      for (let at = 0; at < count; at++) {
        shown.player.seek(at);
        await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
        const { cells, step, high } = tree, left = tree.from ? tree.left ?? [] : [];
        const places = Array.from({ length: cells.length / 2 }, (_, page) => [cells[2 * page], cells[2 * page + 1]]);
        const all = [...places.filter(([x]) => x >= 0), ...left];
        const near = ([x, y], [a, b]) => Math.abs(x - a) < step - 0.01 && Math.abs(y - b) < high;
        if (all.some((one, index) => all.slice(index + 1).some((other) => near(one, other)))) found.push(at);
      }
      return found;
    }""",
        len(LINES),
    )
    assert overlaps == []


CUT = """() => {
  const list = document.querySelector(".v-said"), low = list.getBoundingClientRect().bottom + 1;
  const cut = (item) => item.scrollWidth > item.clientWidth + 1 || item.getBoundingClientRect().bottom > low;
  return Array.from(list.querySelectorAll("li, .v-sentence")).filter(cut).map((item) => item.textContent);
}"""


@pytest.mark.parametrize("width", [390, 800, 1440])
def test_sentences_are_whole_and_the_panels_keep_their_place(visit: Any, tmp_path: Path, width: int) -> None:
    page, tops = opened(visit, tmp_path, width=width), set()
    for at in range(0, len(LINES), 5):
        page.evaluate(PAUSED, at)
        tops.add(page.evaluate("document.querySelector('.v-pages').getBoundingClientRect().top"))
        assert page.evaluate(CUT) == [], at
    assert len(tops) == 1


def test_sentences_are_laid_out_anew_in_a_paused_view_that_gets_lower(visit: Any, tmp_path: Path) -> None:
    """As on a phone, from the engine alone to the engine beside the chat: the width stays."""
    page = opened(visit, tmp_path, width=390)
    most = max(range(len(LINES)), key=lambda at: len(LINES[at].get("new", ())))
    page.evaluate(PAUSED, most)
    for height in (6.6, 3.3):
        page.evaluate("height => document.querySelector('.v-said').style.height = `${height}em`", height)
        page.evaluate(PICTURES)
        page.evaluate(PICTURES)
        low = "list => [list.getBoundingClientRect().bottom, list.lastChild.getBoundingClientRect().bottom]"
        end, last = page.locator(".v-said").evaluate(low)
        assert last <= end + 1
        expect(page.locator(".v-said li").last).to_contain_text("more")


def test_a_request_that_waits_says_what_it_needs_and_what_there_is(shown: Page) -> None:
    r = next(new["r"] for line in LINES for new in line.get("new", ()))
    for why, said in (
        (("pages", 5, 3), "it needs 5 pages"),
        (("watermark", 3, 5), "it needs 3 pages; 5 are available, some reserved for running requests"),
        (("watermark", 1, 1), "it needs 1 page; 1 is available, some reserved for running requests"),
    ):
        line = {"t": LINES[-1]["t"] + 1, "held": [[r, *why]]}
        shown.evaluate("line => { shown.history.push(line); shown.player.seek(shown.history.end - 1); }", line)
        expect(shown.locator(".v-said")).to_contain_text(f"r{r} waits: {said}")


def test_the_pointer_says_what_can_be_clicked_and_so_do_the_words(shown: Page) -> None:
    shown.evaluate(PAUSED, 80)
    canvas = shown.locator(".v-pages canvas")
    canvas.hover(position={"x": 50, "y": 5})
    expect(canvas).to_have_css("cursor", "pointer")
    canvas.hover(position={"x": 2, "y": 5})
    expect(canvas).not_to_have_css("cursor", "pointer")
    axis = shown.locator(".v-time canvas")
    axis.hover(position={"x": 200, "y": 5})  # a click goes to that step
    expect(axis).to_have_css("cursor", "pointer")
    axis.hover(position={"x": 2, "y": 5})
    expect(axis).not_to_have_css("cursor", "pointer")
    shown.mouse.move(0, 0)
    expect(shown.locator(".v-details")).to_contain_text("a branch, a lane or a word")
