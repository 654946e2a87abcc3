"""Installs the overlay in the Python processes that a run with a workspace starts. Python imports this module at its
start, since `chapters.overlay.environment` puts this folder on their path."""

import os
from pathlib import Path

if os.environ.get("NANO_COURSE_OVERLAY"):
    from chapters import overlay

    overlay.install(Path(os.environ["NANO_COURSE_ROOT"]), Path(os.environ["NANO_COURSE_OVERLAY"]))
