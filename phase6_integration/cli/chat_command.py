"""`nanoserve chat`: its flags. Without --url the model is run here, by an engine of its own."""

import argparse
import logging
from typing import Any

from phase6_integration.cli.clients import add_model, add_server, key_of, model_options
from phase6_integration.cli.parsing import Parser, Subparsers


def add(subparsers: Subparsers) -> None:
    """Give `nanoserve` this command."""
    about = "chat in the terminal, with a model run here or with a server"
    parser = subparsers.add_parser(
        "chat",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        usage="nanoserve chat [MODEL] [flags]",
        argument_default=argparse.SUPPRESS,
    )
    add_model(parser)
    talk, server = parser.add_argument_group("the chat"), parser.add_argument_group("a server instead")
    talk.add_argument("--system", metavar="TEXT", help="the message that comes before all others")
    talk.add_argument("--temperature", type=float, metavar="T", default=0.5, help="0: always the likeliest (0.5)")
    talk.add_argument("--max-tokens", type=int, metavar="N", default=256, help="most tokens of an answer (256)")
    talk.add_argument("--seed", type=int, metavar="N", help="of what is drawn")
    add_server(server)
    parser.set_defaults(run=lambda given: run(given, parser))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """All arguments are checked before anything is loaded."""
    from phase0_request.params import SamplingParams
    from phase6_integration.cli.chat import converse
    from phase6_integration.cli.conversation import Local, Remote, Speaker
    from phase6_integration.http_client import Target

    options: dict[str, Any] = vars(given)
    asked = {name: options[name] for name in ("temperature", "max_tokens", "seed") if name in options}
    try:
        params = SamplingParams(**asked)
        engine = model_options(options)
        target = Target.of(options["url"], key_of(options)) if options["url"] else None
    except ValueError as error:
        parser.error(str(error))

    logging.getLogger("phase6_integration").addHandler(logging.NullHandler())  # the chat says itself what went wrong

    async def speaker() -> Speaker:
        return await (Local.open(engine) if target is None else Remote.open(target, options.get("model")))

    return converse(speaker, params, options.get("system"), parser.prog)
