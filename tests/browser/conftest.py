"""A server as a user starts it, and pages of it in headless Chromium, which must be installed: nothing is skipped.

A page fails its test if the browser reports an error on it, such as an exception or something that the
Content-Security-Policy stopped. Conditions are waited for; nothing sleeps.
"""

import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
NAMES = ("chromium", "chromium-browser", "google-chrome", CHROME)
PATIENCE = 30_000  # milliseconds for a condition
Open = Callable[..., Page]
Serve = Callable[..., str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serve", default="nanoserve serve", metavar="COMMAND", help="starts the server")


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """The address of a server. It must end in order, and without a traceback in its log."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        log: list[str] = []
        for line in process.stderr:
            log.append(line)
            if re.search(r"\bready\b.*http", line):
                break
        address = re.search(r"listening.*(http://[\d.]+:\d+)", "".join(log))
        assert address, f"the server ended before it was ready:\n{''.join(log)}"
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        try:
            yield address[1]
        finally:
            process.terminate()
            assert process.wait(60) == 0, "".join(log)
            reader.join()
    assert "Traceback" not in "".join(log), "".join(log)


@pytest.fixture(scope="session")
def serve(pytestconfig: pytest.Config) -> Iterator[Serve]:
    """Starts a server of the bundled model, on a port of its own, with further flags. Returns its address; the same
    flags are the same server."""
    command, urls = shlex.split(pytestconfig.getoption("--serve")), dict[tuple[str, ...], str]()
    with ExitStack() as stack:

        def start(*flags: str) -> str:
            if flags not in urls:
                urls[flags] = stack.enter_context(serving([*command, "--port", "0", *flags]))
            return urls[flags]

        yield start


@contextmanager
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f"no Chromium: install it (apt-get install chromium), or name it in CHROMIUM. Looked for {NAMES}"
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox is not for root
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens an address in a new profile: `width`, `height`, `theme`. `faults`: a pattern of errors that it may have."""
    with ExitStack() as stack:
        seen: list[str] = []

        def note(message: ConsoleMessage, allowed: str) -> None:
            if message.type == "error" and not (allowed and re.search(allowed, message.text)):
                seen.append(message.text)

        def open_page(
            url: str, width: int = 1440, height: int = 900, theme: Any = "light", faults: str = "", **more: Any
        ) -> Page:
            viewport: Any = {"width": width, "height": height}
            context = stack.enter_context(
                browser.new_context(viewport=viewport, color_scheme=theme, **{"reduced_motion": "reduce"} | more)
            )
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            page.on("console", lambda message: note(message, faults))
            page.on("pageerror", lambda error: seen.append(str(error)))
            page.goto(url)
            return page

        yield open_page
    assert seen == [], "the browser reports errors"


@pytest.fixture(scope="session")
def accessible() -> Callable[..., None]:
    """Fails if axe finds a serious fault on the page as it is now, or within a part of it."""

    def check(page: Page, within: str | None = None) -> None:
        found = Axe().run(page, context=within).response["violations"]
        serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
        assert [(fault["id"], [node["target"] for node in fault["nodes"]]) for fault in serious] == []

    return check


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]
