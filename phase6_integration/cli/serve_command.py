"""`nanoserve serve`: an OpenAI-compatible server."""

import argparse
import os
import sys

from phase0_request.support.flags import Parser
from phase6_integration import serve_flags
from phase6_integration.api.settings import API_KEYS

__all__ = ["add_flags", "run"]

DEMO = {"kv_cache_pages": 52, "max_num_batched_tokens": 96, "max_chunk_size": 64}
SMALL = "--demo: a small pool, to see it fill: 52 pages, 96 tokens a step, chunks of 64; leave it out for the real size"
VISIBLE = f"every user of this machine can see --api-key in ps; use --api-key-file or {API_KEYS[0]}"


def add_flags(parser: Parser) -> None:
    serve_flags.add_flags(parser)
    small = "52 pages, 96 tokens a step, chunks of 64"
    about = f"the bundled model with a pool so small that the page shows it fill: {small} (off)"
    parser.add_argument("--demo", action="store_true", help=about)


def run(given: argparse.Namespace, parser: Parser) -> int:
    demo = "demo" in given
    if demo and "model" in given:
        parser.error(f"--demo is for the bundled model; leave it out to serve {given.model}")
    arguments = {**(DEMO if demo else {}), **vars(given)}
    try:
        options, settings = serve_flags.options_from(arguments), serve_flags.settings_from(arguments, os.environ)
    except ValueError as error:
        parser.error(str(error))
    from phase6_integration.serve import serve

    formatter = None
    if settings.log_format == "human" or (settings.log_format is None and sys.stderr.isatty()):
        from phase6_integration.cli.terminal import HumanFormatter

        formatter = HumanFormatter()
    return serve(options, settings, [VISIBLE] * ("api_key" in given) + [SMALL] * demo, formatter)
