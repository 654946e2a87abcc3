"""Entry points: run a command's `main`, which imports from the installation and never from the working directory.

`python -m` and `python -c` put the working directory first on `sys.path`, in the processes that a program starts too.
A `json.py` beside a downloaded model would then run with the rights of the server.

`__main__` modules import only this module and name their `main` as a string. So the working directory is off the path
before anything else is imported, and an interrupt is also caught during imports, which take seconds if they load torch.
"""

import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

PR_SET_PDEATHSIG = 1
INSTALLATION = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))  # where the phases are


def run(main: str, *arguments: str) -> NoReturn:
    """Import and call "module:function", then exit with the code it returns. Ctrl-C ends it with exit code 130 and no
    traceback."""
    here, kept = os.path.realpath(""), os.path.realpath(INSTALLATION)
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here or here == kept]
    os.environ["PYTHONSAFEPATH"] = "1"  # for the Python processes that it starts
    module, _, function = main.partition(":")
    try:
        code = getattr(import_module(module), function)(*arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends what still runs at exit
    except BrokenPipeError:  # the reader closed the pipe: `nanoserve generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent dies. False if the parent is already dead."""
    if sys.platform == "linux":
        from ctypes import CDLL

        CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def environment() -> dict[str, str]:
    """The environment of a Python process that imports from where this one does, not from its working directory."""
    path = list(filter(None, sys.path))
    if INSTALLATION not in path:  # it is there as "": before other installations
        path.insert(0, INSTALLATION)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
