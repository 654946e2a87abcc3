"""`python -m phase6_integration.load`: put a server under load and measure it; `nanoserve bench` is the same."""

import sys

from phase6_integration.load.command import main

if __name__ == "__main__":
    sys.exit(main())
