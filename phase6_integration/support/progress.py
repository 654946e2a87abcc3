"""Progress: shows how far the engine, while it loads, has compiled the kernels."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Shown(logging.Handler):
    """Shows each record with a function."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


@contextmanager
def reported(show: Callable[[str], object]) -> Iterator[None]:
    """Call `show` with each sentence about how far the kernels are compiled."""
    shown, logger = _Shown(show), logging.getLogger("phase2_prefill_decode")
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(shown)
        logger.setLevel(logging.NOTSET)
