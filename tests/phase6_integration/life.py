"""The life of a `nanoserve serve`: a process, what it says, and what asks it things meanwhile."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds that a test waits for what must happen
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}

# The same server over an engine that is a script. It is not READY before the first SIGUSR1, and says nothing of its
# answers before the second. One of its threads is in a call that never ends.
SCRIPTED = """
import signal, sys, asyncio, threading
from phase6_integration.process.health import Health
from phase6_integration.cli.main import main
from phase6_integration import serve
from phase6_integration.process.messages import Ready
from tests.phase6_integration.fake_engine import FakeEngine

class Slow(FakeEngine):
    def __init__(self, options):
        super().__init__()
        self.flow.clear()
    async def start(self):
        self.health, self.reason = Health.LOADING, "the model is being loaded"
        self.word = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._told)
        loop.run_in_executor(None, threading.Event().wait)
    async def ready(self):
        await self.word.wait()
    def _told(self):
        if self.health is Health.LOADING:
            self.handle(Ready(2048, 100, 16, "nowhere", "none"))
            self.word.set()
        else:
            self.flow.set()

serve.AsyncEngine = Slow
{first}
sys.exit(main())
"""


# The same server over an engine process that another function makes, such as one of `faults`.
OTHER_ENGINE = """
import sys
from functools import partial
from phase6_integration.cli.main import main
from phase6_integration import serve
serve.AsyncEngine = partial(serve.AsyncEngine, factory="tests.phase6_integration.{factory}")
sys.exit(main())
"""


class Life:
    """One server. `lines` is what it has written; `url` is known once it listens."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.log_is_read = threading.Event()  # cleared: its pipe fills up
        self.log_is_read.set()
        self._said: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log_is_read.wait()
            self._said.put(line.rstrip("\n"))
        self._said.put(None)

    def until(self, pattern: str) -> "re.Match[str]":
        """Read on to a line that has this in it."""
        while (line := self._said.get(timeout=PATIENCE)) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended without {pattern!r}; it said:\n" + "\n".join(self.lines))

    def listening(self) -> str:
        return self.until(r"listening.*(http://[\d.]+:\d+)")[1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit code; then `lines` is all that it said."""
        code = self.process.wait(PATIENCE)
        while (line := self._said.get(timeout=PATIENCE)) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        """Once it has ended, or was killed."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def engines(self) -> list[int]:
        """The process ids of its engines."""
        return engines(self.process.pid)


def engines(parent: int) -> list[int]:
    """The engine processes among the children of a process."""
    module = "phase6_integration.process.engine_process"
    return [child.pid for child in psutil.Process(parent).children() if module in child.cmdline()]


def started(
    *arguments: str,
    port: int | None = 0,
    scripted: bool = False,
    first: str = "",
    factory: str = "",
    **environment: str,
) -> "subprocess.Popen[str]":
    """`nanoserve serve` on this port, or without the flag."""
    place = () if port is None else ("--port", str(port))
    start = ["-m", "phase6_integration.cli"]
    if scripted or factory:
        start = ["-c", SCRIPTED.replace("{first}", first) if scripted else OTHER_ENGINE.replace("{factory}", factory)]
    return subprocess.Popen(
        [sys.executable, *start, "serve", *place, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT | environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@contextmanager
def life(
    *arguments: str, scripted: bool = False, first: str = "", factory: str = "", **environment: str
) -> Iterator[Life]:
    """`nanoserve serve --port 0` with these arguments, until the end of the block at the latest. `first` is what a
    scripted one does before; `factory` makes another engine than the bundled one: `faults:light`, say."""
    one = Life(started(*arguments, scripted=scripted, first=first, factory=factory, **environment))
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
        one.close()


@contextmanager
def scripted(*arguments: str, first: str = "", **environment: str) -> Iterator[tuple[Life, str]]:
    """A scripted one that is READY, and its address. A stream begins before its first token is there."""
    with life("--keepalive", "0.1", *arguments, scripted=True, first=first, **environment) as one:
        url = one.listening()
        one.signal(signal.SIGUSR1)
        one.until("ready")
        yield one, url


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # or it ended between the opening and the reading
        return True


def stream(http: httpx2.Client, url: str, **body: Any) -> Iterator[str]:
    """The data of the events of a completion."""
    body = {"prompt": [5, 6, 7], "stream": True, **body}
    with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for one in response.iter_lines():
            if one.startswith("data: "):
                yield one.removeprefix("data: ")


def values(lines: Sequence[str], name: str) -> list[str]:
    """What the lines of the log say of this field."""
    return [found[1] for line in lines if (found := re.search(rf" {name}=(\S+)", line))]


PAIR = re.compile(r'([^\s="]+)=("(?:[^"\\\x00-\x1f]|\\.)*"|[^\s="]+)(?: |$)')


def logfmt(line: str) -> dict[str, str]:
    """The pairs of a line, by the grammar of Go's logfmt; between two is one space."""
    pairs, end = {}, 0
    while end < len(line):
        found = PAIR.match(line, end)
        assert found, f"no logfmt from column {end} on: {line}"
        pairs[found[1]] = json.loads(found[2]) if found[2].startswith('"') else found[2]
        end = found.end()
    return pairs
