"""Configuration files, and what they name."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import configuration
from ray.serve.schema import ApplicationStatus

from phase6_integration.cluster import deploy
from phase6_integration.cluster.deployments import by_queue_and_pages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"http_options": {"prt": 1}}, "http_options.prt: Extra inputs are not permitted"),
        ({"applications": []}, "one must have import_path"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(configuration(2, 8000) | change))
    command = [sys.executable, "-m", "phase6_integration.cli", "deploy", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("requests", "pages_used", "replicas"),
    [
        (40, [0.1, 0.1], 4),  # ten requests each
        (0, [], 0),
        (4, [0.8, 0.8], 2),  # few requests, with pools as full as they may be
        (4, [1.0, 1.0], 2.5),
    ],
)
def test_replicas_suffice_for_the_requests_and_for_their_pages(
    requests: int, pages_used: list[float], replicas: float
) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10)
    metrics = {"pages_used": dict(enumerate(pages_used))}
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)
    assert by_queue_and_pages(context) == (pytest.approx(replicas), {})


def test_an_update_that_fails_does_not_stop_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only an application that never ran ends the command."""
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(configuration(2, 8000)))
    received: list[int] = []

    def ends(*states: ApplicationStatus) -> int:
        """The exit status when an application goes through some states, and a signal comes behind them."""
        left = [*states]

        def status() -> Any:
            app = SimpleNamespace(status=left.pop(0), message="")
            received.extend([] if left else [signal.SIGTERM])
            return SimpleNamespace(applications={"nanoserve": app})

        monkeypatch.setattr(deploy.serve, "status", status)
        return deploy._until_signal(file, received)

    monkeypatch.setattr(deploy, "serve_start", lambda **_: SimpleNamespace(deploy_apps=lambda config: None))
    monkeypatch.setattr(deploy, "TICK", 0)
    assert ends(ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED) == 1
    received.clear()
    assert ends(ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED) == 0
