"""`nanoserve serve`: an OpenAI-compatible server."""

import argparse
import os

from phase0_request.support.flags import Parser
from phase6_integration.api.settings import API_KEYS
from phase6_integration.serve_flags import add_flags, options_from, settings_from

__all__ = ["add_flags", "run"]

VISIBLE = f"every user of this machine can see --api-key in ps; use --api-key-file or {API_KEYS[0]}"


def run(given: argparse.Namespace, parser: Parser) -> int:
    arguments = vars(given)
    try:
        options, settings = options_from(arguments), settings_from(arguments, os.environ)
    except ValueError as error:
        parser.error(str(error))
    from phase6_integration.serve import serve

    return serve(options, settings, [VISIBLE] if "api_key" in given else [])
