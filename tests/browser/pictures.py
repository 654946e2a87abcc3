"""`make pictures`: the page as it looks, for a designer's eye, and its first twenty seconds, in build/pictures; and the
README's animation.

The engine takes milliseconds for a step, so the animation goes through its record step by step, as a visitor would.
"""

import argparse
import io
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import chromium, serving
from PIL import Image
from playwright.sync_api import Browser, Page, expect

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/pictures"
ANIMATIONS = {theme: ROOT / f"chapters/figures/page{'-dark' * (theme == 'dark')}.webp" for theme in ("light", "dark")}
RECORD = ROOT / "phase6_integration/extras/page/static/viewer/first.jsonl"
# For how many milliseconds the animation shows a line of the record: the longest that it has a reason for. The four
# chunks of a long prompt take as long as the first sharing of pages, and as the preemption.
LASTS = {"preempted": 1400, "shared": 1300, "new": 350, "prefill": 330, "held": 120, "done": 120, "decode": 50}
ALONE = 25  # where one request decodes and nothing else happens
BEGINNING, END = 500, 1000  # an empty pool, and the end
# What is left out: all but pages, lanes and what happens. Bars and series, which begin at LANES, are cut off.
ASIDE = (
    "body > header, #chat, #watching, #recorded, .v-name, .v-transport, .v-tree, .v-who, .v-why, .v-is-gap, "
    "li:has(> :is(.v-mark-drawn, .v-mark-budget))"
)
LANES = 160  # pixels of the batch's canvas
SIZES = {390: 844, 1440: 900, 2560: 1440}
DRAWN = "() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
LOSSLESS = {"lossless": True, "method": 6}


def opened(browser: Browser, url: str, width: int, height: int, theme: str) -> Page:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    expect(page.get_by_text("ready", exact=True)).to_be_visible()
    return page


def crowd(page: Page, name: str, ended: str = "8 of 8") -> None:
    """Run several requests to their end."""
    panel = page.get_by_role("toolbar").get_by_role("button", name="Several at once")
    panel.click()
    page.get_by_role("button", name=name).click()
    if panel.get_attribute("aria-expanded") == "true":
        panel.click()
    expect(page.get_by_text(f"{ended} have ended")).to_be_visible()


def question(page: Page) -> None:
    page.get_by_role("button", name="What is a KV cache?").click()
    expect(page.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "false")


def stills(browser: Browser, url: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for width, height in SIZES.items():
        for theme in ("light", "dark"):
            page = opened(browser, url, width, height, theme)
            shares = re.compile(r"[1-9]\d* pages shared")
            expect(page.locator(".v-pages canvas")).to_have_attribute("aria-label", shares)
            page.screenshot(path=FOLDER / f"{width}-{theme}-first.png")
            question(page)
            crowd(page, "8 that share a prefix")
            page.screenshot(path=FOLDER / f"{width}-{theme}-chat.png")
            if width < 960:
                page.get_by_role("button", name="Engine", exact=True).click()
            page.get_by_role("button", name="To the end", exact=True).click()
            back(page, 40)
            page.screenshot(path=FOLDER / f"{width}-{theme}-engine.png")
            page.context.close()


def back(page: Page, steps: int) -> None:
    for _ in range(steps):
        page.get_by_role("button", name="A step back", exact=True).click()


def film(browser: Browser, url: str) -> None:
    """The first twenty seconds: a recorded run, a question after six of them, and several at once after ten."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    page, began, frames = opened(browser, url, 1280, 800, "light"), time.monotonic(), list[tuple[bytes, int]]()
    acts = [(6, question), (10, lambda page: crowd(page, "8 that share a prefix"))]
    while (passed := time.monotonic() - began) < 20:
        if acts and passed > acts[0][0]:
            acts.pop(0)[1](page)
        shot = page.screenshot()
        frames.append((shot, round(1000 * (time.monotonic() - began - passed))))
    save(frames, FOLDER / "film.webp", quality=80, method=0)


def animation(browser: Browser, url: str) -> None:
    """Pages and lanes of the recorded run as on a phone, for a light page and for a dark one."""
    lines = [json.loads(line) for line in RECORD.read_text("utf-8").splitlines()[1:]]
    lasts = [BEGINNING, *map(milliseconds, lines[1:-1]), END]
    for theme, file in ANIMATIONS.items():
        size = {"width": 800, "height": 800}
        context = browser.new_context(viewport=size, device_scale_factor=2, color_scheme=theme, bypass_csp=True)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(url)
        page.get_by_role("button", name="Engine", exact=True).click()
        page.get_by_role("button", name="To the beginning", exact=True).click()
        page.add_style_tag(content=f"{ASIDE} {{ display: none !important }}")
        page.set_viewport_size({"width": 480, "height": 800})  # the viewer measures its panels again
        page.evaluate(DRAWN)
        lanes = page.locator(".v-time canvas").evaluate("canvas => canvas.getBoundingClientRect().top")
        page.set_viewport_size({"width": 480, "height": round(lanes) + LANES})
        frames, forward = [], page.locator("[aria-label='A step forward']")  # hidden, so without a role
        for each in lasts:
            page.evaluate(DRAWN)
            frames.append((page.screenshot(), each))
            forward.evaluate("button => button.click()")
        save(frames, file)
        context.close()


def milliseconds(line: dict[str, Any]) -> int:
    seen = {*line, "shared"} if any(cached for _, cached in line.get("admitted", ())) else {*line}
    if len(line.get("decode", ())) == 1:
        seen.remove("decode")
    return max((LASTS[what] for what in seen if what in LASTS), default=ALONE)


def save(frames: Sequence[tuple[bytes, int]], file: Path, **how: int) -> None:
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data, _ in frames]
    durations = [duration for _, duration in frames]
    images[0].save(file, save_all=True, append_images=images[1:], duration=durations, loop=0, **(how or LOSSLESS))
    seconds, megabytes = sum(durations) / 1000, file.stat().st_size / 1e6
    print(f"{file.relative_to(ROOT)}: {len(frames)} frames, {seconds:.1f} s, {megabytes:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", default="nanoserve serve", metavar="COMMAND", help="starts the server")
    parser.add_argument("--only", choices=("stills", "film", "animation"), help="one of them")
    given = parser.parse_args()
    with chromium() as browser:
        drawn = {"stills": stills, "film": film, "animation": animation}
        for name, draw in drawn.items():
            if given.only in (name, None):
                with serving([*shlex.split(given.serve), "--port", "0", "--demo"]) as url:
                    draw(browser, url)


if __name__ == "__main__":
    main()
