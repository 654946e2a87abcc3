"""The other files of `phase6_integration/deploy`, and the Dockerfile, by the schemas and linters of their readers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "phase6_integration/deploy"
BIN = Path(sys.executable).parent
UNIT = DEPLOY / "nanoserve@.service"
LATER = 9  # seconds: what a shutdown may take beyond --shutdown-timeout


def missing(given: Any, read: Any, path: str = "") -> list[str]:
    """What is in a document and not in what its reader made of it."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [hole for key, value in given.items() for hole in missing(value, read.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [hole for i, pair in enumerate(zip(given, read, strict=True)) for hole in missing(*pair, f"{path}[{i}]")]
    return [] if given == read else [f"{path}: {given!r}, read as {read!r}"]


def test_grafana_s_schema_knows_every_field_of_the_dashboard() -> None:
    register_default_plugins()
    given = json.loads((DEPLOY / "dashboard.json").read_text())

    def read(document: Any) -> Any:
        return json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))

    assert missing(given, read(given)) == []
    wrong = given | {"paneles": []}
    assert missing(wrong, read(wrong)) == [".paneles: [], read as None"]
    ids = [panel["id"] for panel in given["panels"]]
    cells = [
        (x, y)
        for panel in given["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert (len(set(ids)), len(set(cells)), max(x for x, _ in cells)) == (len(ids), len(cells), 23)


def test_compose_takes_its_file_and_finds_the_others() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    file = DEPLOY / "compose.yaml"
    assert subprocess.run([*command, file], capture_output=True).returncode == 0
    compose = yaml.safe_load(file.read_text())
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", ())]
    files = [mount.partition(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(files) == 3
    assert all((DEPLOY / name).is_file() for name in files)
    assert (DEPLOY / compose["services"]["nanoserve"]["build"]["context"] / "Dockerfile").is_file()
    (target,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"][0].partition(":")[0] in compose["services"]
    providers = yaml.safe_load(compose["configs"]["dashboards"]["content"])["providers"]
    assert any(providers[0]["options"]["path"] in mount for mount in mounts)


def test_the_dockerfile_is_linted_and_runs_as_another_user_and_is_asked_for_its_health() -> None:
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\\\n  CMD .*/health", text, re.MULTILINE)


def test_systemd_takes_the_unit_and_gives_it_the_time_to_drain(tmp_path: Path) -> None:
    text = UNIT.read_text()
    file = tmp_path / UNIT.name
    file.write_text(text.replace("/srv/nanoserve/bin/nanoserve", "/bin/true").replace("/usr/bin/curl", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    file.write_text(file.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert "kill mode" in done.stderr
    limits = {line.partition("=")[0] for line in text.splitlines()}
    assert limits >= {"MemoryMax", "TasksMax", "IPAddressDeny", "LimitNOFILE"}
    found = re.search(r"--shutdown-timeout (\d+)", text), re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    drain, stop = (int(one[1]) for one in found if one is not None)
    assert drain + LATER < stop
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", UNIT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
