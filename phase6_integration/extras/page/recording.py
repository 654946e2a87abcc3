"""Recording: the engine's record while someone watches. One recorder writes for all watchers.

A snapshot occupies the step thread longer the larger the cache is, and anyone may ask for one. So all who ask in one
turn share a snapshot, those who ask soon after it wait, and none is made that nobody waits for any more.
"""

from collections.abc import Callable
from typing import Any

from phase0_request.core import EngineCore
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.loop_hooks import LoopHooks, Send
from phase6_integration.extras.page.record_messages import NAME, Watch, decode_watch, encode

PAUSE = 0.1  # seconds, the least, between the end of a snapshot and the beginning of the next
SHARE = 20  # and so many times as long as the last one took


class Recording:
    """`watch` notes what is asked for; `write` does it, between two steps."""

    def __init__(self, core: EngineCore[Scheduler, Any], send: Callable[[Line], object]) -> None:
        self._core = core
        self._send = send
        self._recorder: Recorder | None = None  # while someone watches
        self._asked: Watch | None = None  # for a snapshot, which is to come
        self._next = core.clock()  # when it may be written

    @property
    def is_waiting(self) -> bool:
        """Whether a snapshot is due."""
        return self._asked is not None

    def watch(self, message: Watch) -> None:
        """Note a reader's request for a snapshot; or end the record, because the last reader has left."""
        self._asked = message if message.on else None
        if not message.on and self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def write(self) -> None:
        """Write the snapshot that is due, if any; at the start of a record it follows the header."""
        if self._asked is None or (began := self._core.clock()) < self._next:
            return
        if self._recorder is None:
            self._recorder = Recorder(self._core, self._send, text=self._asked.text)
        else:
            self._recorder.snapshot()
        self._asked, ended = None, self._core.clock()
        self._next = ended + max(PAUSE, SHARE * (ended - began))

    def flush(self) -> None:
        """Write what has changed since the last step."""
        if self._recorder is not None:
            self._recorder.flush()


def record(core: EngineCore[Scheduler, Any], send: Send) -> LoopHooks:
    """The engine's side of the live record."""
    recording = Recording(core, lambda line: send(NAME, encode(line)))
    return LoopHooks(
        name=NAME,
        is_due=lambda: recording.is_waiting,
        before_step=recording.write,
        no_step=recording.flush,
        received=lambda body: recording.watch(decode_watch(body)),
    )
