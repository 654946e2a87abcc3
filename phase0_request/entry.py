"""Entry points: run a command's `main` so that Ctrl-C at any moment ends it with exit code 130 and no traceback.

`__main__` modules import only this module and name their `main` as a string. So an interrupt is also caught while the
module of `main` is imported, which takes seconds if it imports torch.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def run(main: str, *arguments: str) -> NoReturn:
    """Import and call "module:function", then exit with the code it returns."""
    sys.unraisablehook = _raise_again
    code: object = 1
    try:
        try:
            module, _, function = main.partition(":")
            code = getattr(import_module(module), function)(*arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader closed the pipe: `nanoserve models | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
            code = 128 + signal.SIGPIPE
        except BaseException as error:
            if not interrupted(error):
                raise
            code = INTERRUPTED
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on Ctrl-C kills the process silently
    except KeyboardInterrupt:  # arrived between two of the lines above
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        code = INTERRUPTED
    sys.exit(code)  # type: ignore[arg-type]


def interrupted(error: BaseException | None) -> bool:
    """Whether an exception was caused by Ctrl-C: libraries wrap it in exceptions of their own."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, KeyboardInterrupt):
            return True
        if isinstance(error, BaseExceptionGroup) and any(map(interrupted, error.exceptions)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Resend SIGINT after an interrupt inside a destructor or a garbage collector callback, which Python only prints.

    It is sent a moment later, because one raised while this function runs would be lost as well."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(unraisable)
