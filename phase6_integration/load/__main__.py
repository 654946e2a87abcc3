"""`python -m phase6_integration.load` is `nanoserve bench`."""

import sys

from phase6_integration.cli.bench_command import arguments, run
from phase6_integration.cli.parsing import Parser

if __name__ == "__main__":
    parser = Parser(prog="python -m phase6_integration.load")
    arguments(parser)
    sys.exit(run(parser.parse_args(), parser))
