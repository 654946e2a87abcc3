"""Entry points: run a command's `main`. Ctrl-C ends it with exit code 130 and no traceback.

`__main__` modules import only this module and name their `main` as a string. So the working directory is off the path
before anything else is imported, and an interrupt is also caught during imports, which take seconds if they load torch.
"""

import os
import signal
import sys
from importlib import import_module
from typing import NoReturn

from phase0_request import safe_path


def run(main: str, *arguments: str) -> NoReturn:
    """Import and call "module:function", then exit with the code it returns."""
    safe_path.restrict()
    module, _, function = main.partition(":")
    try:
        code = getattr(import_module(module), function)(*arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends what still runs at exit
    except BrokenPipeError:  # the reader closed the pipe: `nanoserve models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        code = 128 + signal.SIGPIPE
    sys.exit(code)
