"""mine: the server, with the workspace's code in both of its processes."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from chapters import overlay
from chapters.course import Course
from chapters.exercises import load
from chapters.source import find_regions, replace_regions
from chapters.workspace import start
from tests.phase6_integration.life import ENVIRONMENT, PATIENCE, Life

HOME = Path(__file__).resolve().parents[2]
SERVER = """\
import subprocess, sys

from phase0_request.limits import clamp

print(sys.argv[1:], clamp(5, 3), flush=True)
code = "from phase0_request import Queue; queue = Queue(); queue.push(1); print(queue.items)"
sys.exit(subprocess.call([sys.executable, "-c", code]))
"""


def test_it_names_the_answers_and_becomes_the_server(standalone: Course, solve: Callable[[str, str], None]) -> None:
    (standalone.root / "phase6_integration").mkdir()
    (standalone.root / "phase6_integration/__init__.py").touch()
    (standalone.root / "phase6_integration/cli.py").write_text(SERVER)
    start(standalone, standalone.phase(0))
    solve("0.1", "self.items = ['mine']")
    solve("0.3", "return 'mine'")
    command = [sys.executable, "-m", "chapters", "mine", "--port", "0"]
    done = subprocess.run(command, cwd=standalone.root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "Yours: 0.1, 0.3 (2 lines of code). The rest is the reference.\n['serve', '--port', '0'] mine\n['mine']\n"
    )


def test_a_request_is_answered_with_the_workspaces_code(tmp_path: Path) -> None:
    """The engine's process asks `reason_to_finish`, here an answer that ends each request at its fourth token."""
    course = Course(HOME)
    exercise = next(each for each in load(course, course.phase(0)) if each.file == "phase0_request/batch.py")
    text = (HOME / exercise.file).read_text()
    (region,) = find_regions(text, exercise.file)[exercise.region]
    answer = f"{region.indent}return FinishReason.LENGTH if len(request.output_tokens) == 4 else None"
    spoken = "\n\npush = StopScanner.push\nStopScanner.push = lambda self, text: push(self, text).upper()\n"
    (tmp_path / "phase0_request").mkdir()
    (tmp_path / exercise.file).write_text(replace_regions(text, exercise.file, {exercise.region: [[answer]]}))
    front = "phase0_request/detokenizer.py"
    (tmp_path / front).write_text((HOME / front).read_text() + spoken)
    process = subprocess.Popen(
        [sys.executable, "-m", "phase6_integration.cli", "serve", "--port", "0"],
        cwd=HOME,
        env=overlay.environment(HOME, ENVIRONMENT, tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Life(process)
    try:
        url = server.listening()
        server.until("ready")
        body = {"model": "tiny_chat", "prompt": "What is a page?", "max_tokens": 8, "temperature": 0}
        answered = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
        said = answered["choices"][0]["text"]
        assert answered["usage"]["completion_tokens"] == 4
        assert said == said.upper() != said.lower()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    finally:
        process.kill()
        server.close()
