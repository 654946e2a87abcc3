"""Where code is imported from: the installation, never the directory in which a command happens to run.

`python -m` and `python -c` put the working directory first on `sys.path`, in the processes that a program starts too.
A `json.py` beside a downloaded model would then run with the rights of the server.
"""

import os
import sys

INSTALLATION = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where the phases are


def restrict() -> None:
    """Remove the working directory from this process's path, unless it is the installation; no Python process that is
    started from here adds its own."""
    here, kept = os.path.realpath(""), os.path.realpath(INSTALLATION)
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here or here == kept]
    os.environ["PYTHONSAFEPATH"] = "1"


def environment() -> dict[str, str]:
    """The environment of a Python process that imports from where this one does, and not from its working directory."""
    path = list(filter(None, sys.path))
    if INSTALLATION not in path:  # it is there as "": before other installations
        path.insert(0, INSTALLATION)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
