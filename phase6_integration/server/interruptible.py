"""A call in another thread that can be told to end. asyncio gives up on a thread, and the thread never learns of it."""

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]


class _Interrupted(BaseException):
    """Not an Exception: who catches those goes on."""


class Interruptible(Generic[T]):
    """`call`, once. After `interrupt` it raises TimeoutError: at the next line of Python, so a call that waits inside a
    library ends when that returns, and one that has not begun never does."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None  # that it runs in
        self._over = False

    def __call__(self) -> T:
        here = threading.get_ident()
        try:
            try:
                with self._lock:
                    if self._over:
                        raise _Interrupted
                    self._thread = here
                return self._call()
            finally:
                with self._lock:
                    self._thread = None
                _raise_in(here, ctypes.py_object())  # what was to be raised, and was not yet, is forgotten
        except _Interrupted:
            raise TimeoutError("the call was interrupted") from None

    def interrupt(self) -> None:
        with self._lock:
            self._over = True
            if self._thread is not None:
                _raise_in(self._thread, _Interrupted)
