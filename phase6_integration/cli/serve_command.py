"""`nanoserve serve`: an OpenAI-compatible server."""

import argparse
import os

from phase6_integration.cli.common import engine_options
from phase6_integration.engine.flags import Parser
from phase6_integration.serve_flags import API_KEYS, add_flags, server_settings

__all__ = ["add_flags", "run"]

VISIBLE = f"every user of this machine can see --api-key in ps; use --api-key-file or {API_KEYS[0]}"


def run(given: argparse.Namespace, parser: Parser) -> int:
    arguments = vars(given)
    try:
        options, settings = engine_options(arguments), server_settings(arguments, os.environ)
    except ValueError as error:
        parser.error(str(error))
    from phase6_integration.serve import serve

    return serve(options, settings, [VISIBLE] if "api_key" in given else [])
