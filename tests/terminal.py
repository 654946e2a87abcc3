"""Run a command on a pseudo terminal, as a person would: the live views of every phase are tested so."""

import os
import pty
import re
import signal
import subprocess
import termios

SHOWN, HIDDEN = b"\x1b[?25h", b"\x1b[?25l"  # the cursor


def on_a_terminal(*command: str, until: bytes | None = None) -> tuple[int, bytes]:
    """Run to the end, or press Ctrl-C once `until` has been shown (spaces as one). Exit status and output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"},
        start_new_session=True,
    )
    os.close(theirs)
    seen, interrupted = b"", False
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other end is closed: the way Linux says end of file here
            break
        if not piece:
            break
        seen += piece
        if until is not None and not interrupted and until in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\s+", b" ", seen):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(ours)
    return process.wait(30), seen


def after_the_view(seen: bytes) -> bytes:
    """What was written once the live view was over: from where the cursor was last shown."""
    assert seen.rindex(SHOWN) > seen.rindex(HIDDEN), "the cursor was left hidden"
    return seen[seen.rindex(SHOWN) :]
