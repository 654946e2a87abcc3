"""The open loop asks for as much as the closed one did, whatever the server does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phase6_integration.lab.bench import Bench
from phase6_integration.lab.scale import loops
from tests.phase6_integration.adversarial.raw import listening
from tests.phase6_integration.fake_engine import FakeEngine


@contextmanager
def served(bench: Bench) -> Iterator[str]:
    with listening(FakeEngine) as url:
        yield url


def test_both_loops_send_the_same_requests_at_the_same_mean_rate() -> None:
    bench = Bench("", 1, 12, 4, 1)
    with served(bench) as url:
        pair = loops.compare(bench, url, 3)
    closed, opened = pair.closed, pair.open
    assert (closed.max_concurrency, opened.max_concurrency) == (3, None), "clients wait; arrivals do not"
    assert opened.request_rate == closed.request_throughput
    assert closed.total_input_tokens == opened.total_input_tokens
    assert (closed.failed, opened.failed) == (0, 0)


def test_beyond_the_rate_of_the_most_clients_there_is_an_open_loop_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "served", served)
    file = tmp_path / "loops.json"
    assert loops.main(["--requests", "8", "--clients", "1", "2", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert set(figures) == {"clients_1", "clients_2", "beyond"}
    assert figures["beyond"]["rate"] == pytest.approx(loops.BEYOND * figures["clients_2"]["rate"])
    for row in figures.values():
        assert 0 < row["open"]["p50_ttft_ms"] <= row["open"]["p99_ttft_ms"]
