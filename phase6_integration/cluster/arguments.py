"""The arguments of an application in a configuration file: the flags of `nanoserve serve`, with underscores."""

import os
from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError
from phase0_request.support.flags import Parser, did_you_mean
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.options import EngineOptions
from phase6_integration.serve_flags import add_flags, options_from, settings_from

LISTENER = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "root_path")
ELSEWHERE = {  # flags of a server that are no arguments here, and why
    **dict.fromkeys(LISTENER, "Ray Serve listens, so that is set in http_options of the file"),
    "send_timeout": "Ray Serve listens, and waits for slow readers without a limit",
    **dict.fromkeys(("log_level", "log_format"), "Ray Serve writes the logs: logging_config of the file"),
    "kv_events_config": "each replica has its own, which its router reads",
    "max_engine_restarts": "Ray Serve replaces a replica whose engine has failed",
}


def settings_of(args: Mapping[str, Any]) -> tuple[EngineOptions, ServerSettings]:
    """Check the arguments. ConfigError names the first that is wrong."""
    parser = Parser()
    add_flags(parser)
    known = {action.dest for action in parser._actions}
    for name in args:
        if name in ELSEWHERE:
            raise ConfigError(f"{name}: {ELSEWHERE[name]}")
        if name not in known:
            raise ConfigError(f"there is no argument {name!r}{did_you_mean(name, known)}")
    given = {
        name: [value] if name == "served_model_name" and isinstance(value, str) else value
        for name, value in args.items()
    }
    return options_from(given), settings_from(given, os.environ)
