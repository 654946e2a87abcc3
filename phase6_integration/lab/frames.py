"""`python -m phase6_integration.lab frames`: frames a second of the viewer, with 256 requests over 10,000 pages.

A replay of a simulated engine plays at eight times its speed in headless Chromium, which must be installed, in a
window of 1440 by 900. Chromium draws in software where there is no GPU.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer

from rich.console import Console

from phase0_request.lab.report import finish, parser
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.record_file import encoded
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import Trace
from phase6_integration.extras.page.replay import replay

PAGES, REQUESTS, STEPS = 10_000, 4000, 900
NAMES = "chromium", "chromium-browser", "google-chrome"
MEASURE = """
const measured = setInterval(async () => {
  const viewer = globalThis.shown, wait = (ms) => new Promise((done) => setTimeout(done, ms));
  if (!viewer) return;
  clearInterval(measured);
  viewer.player.seek(viewer.history.end / 2);
  viewer.player.speed = 8;
  await wait(1000);
  const begun = performance.now(), frames = viewer.frames;
  viewer.player.play();
  await wait(6000);
  const fps = (1000 * (viewer.frames - frames)) / (performance.now() - begun);
  fetch(`/?${fps}&${viewer.state.in.running}`);
}, 100);
"""


def lines() -> list[Line]:
    """The record of a simulated engine that is full."""
    found: list[Line] = []
    simulation = Simulation(Trace(kind="poisson", requests=REQUESTS, rate=400.0).arrivals(), Setting(pages=PAGES))
    Recorder(simulation.core, found.append)
    while simulation.going and simulation.core.steps < STEPS:
        simulation.step()
    return found


def frames(record: Iterable[Line]) -> tuple[float, int]:
    """Frames a second while the middle of a record plays, and how many requests ran at the end."""
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        raise SystemExit(f"error: no Chromium: looked for {', '.join(NAMES)}, and CHROMIUM in the environment")
    page = replay([("full", "\n".join(map(encoded, record)).encode())])
    page = re.sub(r"<meta http-equiv.*?>", "", page, flags=re.DOTALL)  # the script below is none of the page's
    page = page.replace("</body>", f'<script type="module">{MEASURE}</script></body>')
    measured: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        """Sends the page, and takes what it has measured."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())
            measured.extend(self.path.split("?")[1:])

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server, tempfile.TemporaryDirectory() as folder:
        flags = ["--headless=new", "--window-size=1440,900", f"--user-data-dir={folder}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        address = f"http://127.0.0.1:{server.server_port}/"
        with subprocess.Popen([chromium, *flags, address], stderr=subprocess.DEVNULL) as process:
            server.timeout = 60
            while not measured and process.poll() is None:
                server.handle_request()
            process.terminate()
    rate, running = measured[0].split("&")
    return float(rate), int(running)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab frames", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    rate, running = frames(lines())
    console.print(f"{rate:.1f} frames a second, with {running} requests running over {PAGES:,} pages")
    finish(p, options, arguments, {"fps": rate, "running": running, "pages": PAGES})
    return 0
