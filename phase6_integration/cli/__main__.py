"""`python -m phase6_integration.cli` is `nanoserve`, where that is not on the path."""

import sys

from phase6_integration.cli.main import main

sys.exit(main())
