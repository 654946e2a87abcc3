"""Entry points: run a command's `main` so that Ctrl-C at any moment ends it with exit code 130 and no traceback.

`__main__` modules import only this module and name their `main` as a string. So an interrupt is also caught while the
module of `main` is imported, which takes seconds if it imports torch.
"""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import NoReturn

from phase0_request import safe_path

INTERRUPTED = 128 + signal.SIGINT
LATER = 0.05  # seconds until an interrupt that came at a bad moment is raised again
# Where an interrupt gets lost or does harm: in an import, which may stay half done; where C++ of torch calls Python and
# makes any exception a ValueError; in llvmlite's objects, which would be left half made or be freed twice.
UNSAFE_IN = ("<frozen importlib._bootstrap>", os.path.join("torch", "storage.py"), os.path.join("llvmlite", "binding"))


def run(main: str, *arguments: str) -> NoReturn:
    """Import and call "module:function", then exit with the code it returns."""
    code: object = 1
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores Ctrl-C
            signal.default_int_handler = _interrupt  # type: ignore[assignment]  # asyncio takes over from this alone
            signal.signal(signal.SIGINT, _interrupt)
            signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
            sys.unraisablehook = _unraisable
        try:
            safe_path.restrict()
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
        finally:
            if signal.setitimer(signal.ITIMER_REAL, 0)[0]:  # the command ended before its interrupt was raised again
                code = INTERRUPTED
        if signal.getsignal(signal.SIGINT) is _interrupt:
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


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; if it came inside unsafe code, a little later."""
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in UNSAFE_IN):
            signal.setitimer(signal.ITIMER_REAL, LATER)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise an interrupt again that came inside a destructor, where Python prints and forgets it."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, LATER)
    else:
        sys.__unraisablehook__(unraisable)
