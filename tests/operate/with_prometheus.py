"""The dashboard and the alerts of `phase6_integration/deploy`, asked of a real Prometheus over a real server."""

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase6_integration.lab.scale.upgrade import DEPLOY, free_port
from tests.phase6_integration.life import PATIENCE, Life, life

DASHBOARD = json.loads((DEPLOY / "dashboard.json").read_text())
QUERIES = {
    f"{panel['title']}, {target['legendFormat']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
RULES = (DEPLOY / "alerts.yml").read_text()
TEXT = "A page of the cache holds the keys and values of a few tokens. " * 3


class Prometheus:
    def __init__(self, http: httpx2.Client) -> None:
        self.http = http

    def ask(self, path: str, **parameters: str) -> Any:
        response = self.http.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def values(self, query: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.ask("/query", query=query)["result"]]

    def has_fired(self, alert: str) -> bool:
        return bool(self.values(f'count_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[10m])'))

    def fires(self, alert: str) -> bool:
        return bool(self.values(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))


def until(condition: Callable[[], Any], what: object = "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Life, str]]:
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    with life("--speculative-config", drafts, "--max-num-seqs", "4") as one:
        url = one.listening()
        one.until("ready")
        yield one, url
        if one.process.poll() is None:
            one.signal(signal.SIGTERM)
            one.ended()


@pytest.fixture(scope="module")
def prometheus(server: tuple[Life, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the files of `deploy`, but for the server's address and times, which are shorter."""
    directory, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = (DEPLOY / "prometheus.yml").read_text().replace("nanoserve:8000", server[1].removeprefix("http://"))
    config, times = re.subn(r"interval: \d+s", "interval: 250ms", config)
    rules, waits = re.subn(r"for: \d+m", "for: 500ms", RULES)
    assert min(times, waits) >= 2
    (directory / "prometheus.yml").write_text(config)
    (directory / "alerts.yml").write_text(rules)
    flags = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    command = ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with subprocess.Popen(command) as process, httpx2.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as http:
        try:
            one = Prometheus(http)
            until(lambda: process.poll() is None and _answers(one))
            yield one
        finally:
            process.terminate()


def _answers(one: Prometheus) -> bool:
    try:
        return one.values("up") == [1.0]
    except httpx2.ConnectError:
        return False


@contextmanager
def load(url: str) -> Iterator[None]:
    """Eight clients, of whom four wait; prompts that share a beginning, and answers that can be drafted."""
    stop = threading.Event()

    def client() -> None:
        body = {"model": "tiny_chat", "prompt": TEXT, "max_tokens": 96, "temperature": 0, "ignore_eos": True}
        with httpx2.Client(base_url=url, timeout=PATIENCE) as http:
            while not stop.is_set():
                assert http.post("/v1/completions", json=body).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client) for _ in range(8)]
        try:
            yield
        finally:
            stop.set()
    assert [one.result() for one in clients] == [None] * 8


def test_its_files_are_sound() -> None:
    for command in (["check", "config", DEPLOY / "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=Path(__file__).parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (Path(__file__).parent / "alerts_test.yml").read_text()
    named = re.findall(r"alertname: (\w+)", tested)
    assert [name for name in re.findall(r"alert: (\w+)", RULES) if named.count(name) < 2] == []


def test_every_query_of_the_dashboard_is_answered_by_numbers(server: tuple[Life, str], prometheus: Prometheus) -> None:
    """While the server is under load. So are those that fill its variables."""
    unanswered = dict(QUERIES)
    variables = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]

    def ask() -> bool:
        for name, query in [*unanswered.items()]:
            values = prometheus.values(filled(query))
            if values and all(map(math.isfinite, values)):
                del unanswered[name]
        return not unanswered

    with load(server[1]):
        until(ask, unanswered)
        for query in variables:
            selector, label = query.removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            assert prometheus.ask(f"/label/{label}/values", **{"match[]": filled(selector)})
    assert len(QUERIES) == sum(len(panel["targets"]) for panel in DASHBOARD["panels"]) > 30


def filled(query: str) -> str:
    """A query as Grafana sends it."""
    query = query.replace("$__rate_interval", "5s").replace("$model", "tiny_.*").replace("$instance", ".*")
    assert "$" not in query
    return query


def test_alerts_fire_when_the_engine_dies_and_when_the_server_does(
    server: tuple[Life, str], prometheus: Prometheus
) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("/rules")["groups"] for rule in group["rules"]]

    until(lambda: {rule["health"] for rule in rules()} == {"ok"}, "a rule cannot be evaluated")
    names = ("NanoserveDown", "NanoserveEngineDown", "NanoserveEngineRestarted")  # not those of latencies
    assert [name for name in names if prometheus.has_fired(name)] == []
    one, _ = server
    os.kill(one.engines()[0], signal.SIGKILL)
    until(lambda: prometheus.has_fired("NanoserveEngineDown"))
    until(lambda: not prometheus.fires("NanoserveEngineDown"))
    until(lambda: prometheus.fires("NanoserveEngineRestarted"))
    assert prometheus.values("nanoserve:engine_up") == [1.0]
    assert not prometheus.has_fired("NanoserveDown")
    one.process.kill()
    until(lambda: prometheus.fires("NanoserveDown"))
