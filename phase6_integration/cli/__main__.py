"""`python -m phase6_integration.cli` is `nanoserve`, for an environment that is not on the path."""

from phase6_integration.cli import main

main()
