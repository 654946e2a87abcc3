"""deploy: a Ray cluster of one machine, with the applications of a configuration file, from the start to Ctrl-C."""

import logging
import signal
import sys
import time
from pathlib import Path

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from phase0_request.support.checks import ConfigError
from phase6_integration.cluster.arguments import settings_of
from phase6_integration.cluster.deployments import IMPORT_PATH

RUNNING, FAILED = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED
TICK = 0.2  # seconds between two looks at the state of the applications


def load(file: Path) -> ServeDeploySchema:
    """Read and check a configuration file. ValueError says what is wrong with it."""
    try:
        given = yaml.safe_load(file.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"this is no YAML: {error}") from None
    try:
        config = ServeDeploySchema.model_validate(given, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    own = [app for app in config.applications if app.import_path == IMPORT_PATH]
    if not own:
        raise ConfigError(f"applications: one must have import_path {IMPORT_PATH}")
    for app in own:
        settings_of(app.args)
    return config


def deploy(file: Path) -> int:
    """Run the applications until a signal. SIGHUP reads the file again: what has changed is replaced,
    replica by replica. Exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the applications cannot be deployed."""
    received: list[int] = []
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",  # Ray's ports have no authentication
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        return _until_signal(file, received)
    finally:
        say("stopping")
        serve.shutdown()
        ray.shutdown()


def _until_signal(file: Path, received: list[int]) -> int:
    """Deploy, and say what becomes of it, until a signal to stop."""
    config = load(file)
    client = serve_start(http_options=config.http_options.model_dump(), proxy_location=config.proxy_location)
    client.deploy_apps(config)
    said: dict[str, str] = {}
    ran = set[str]()
    while True:
        for name, app in serve.status().applications.items():
            if said.get(name) != app.status:
                said[name] = app.status
                words = app.message if app.status is FAILED else ""
                if app.status is RUNNING:
                    ran.add(name)
                    words = f"http://{config.http_options.host}:{config.http_options.port}"
                say(f"{name} is {app.status.value.lower()}{words and ': '}{words}")
            if app.status is FAILED and name not in ran:  # of one that ran, the replicas of before an update still do
                return 1
        while received:
            number = received.pop(0)
            if number != signal.SIGHUP:
                return 0 if number == signal.SIGTERM else 128 + number
            try:
                client.deploy_apps(load(file))
            except (OSError, ValueError) as error:
                say(f"nothing is changed: {file}: {error}")
        time.sleep(TICK)


def say(text: str) -> None:
    print(f"nanoserve deploy: {text}", file=sys.stderr, flush=True)
