"""stderr is a pipe that nothing reads: a supervisor that stalls must not stop the server."""

import json
import signal
import subprocess
import sys

import httpx2

from tests.phase6_integration.life import ENVIRONMENT, PATIENCE, ROOT

SERVER = """
import sys
from phase6_integration.engine.options import EngineOptions
from phase6_integration import serve
from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.fake_engine import FakeEngine

serve.AsyncEngine = FakeEngine
sys.exit(serve.serve(EngineOptions(), ServerSettings(port=0, log_format="json")))
"""
REQUESTS = 600  # access log lines of twice what a pipe holds


def test_a_log_that_nothing_reads_stops_neither_requests_nor_the_shutdown() -> None:
    """After 207 requests the pipe was full. The next line of the access log blocked the event loop, and SIGTERM had no
    effect: its handler runs on that loop."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT) as server:
        try:
            assert server.stderr is not None
            lines = (json.loads(line) for line in server.stderr)
            url = next(line["url"] for line in lines if line["message"] == "listening")
            with httpx2.Client(base_url=url, timeout=PATIENCE) as http:
                for number in range(REQUESTS):
                    assert http.get(f"/v1/models/{'x' * 180}-{number}").status_code == 404
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
        finally:
            server.kill()
