"""Run a command on a pseudo terminal, as a person would: the live views of every phase are tested so."""

import os
import pty
import re
import select
import signal
import subprocess
import termios

END = b"\0end\0"
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
    seen, interrupted, ended = b"", False, False
    while not seen.endswith(END):
        if not ended and process.poll() is not None:
            ended = True
            os.write(theirs, END)  # behind all that the process wrote, which may not be here yet
        if select.select([ours], [], [], 0.05)[0]:
            seen += os.read(ours, 4096)
        if until is not None and not interrupted and until in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\s+", b" ", seen):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(theirs)  # not earlier: what was written just before the last one closes may be lost
    os.close(ours)
    return process.wait(30), seen.removesuffix(END)


def after_the_view(seen: bytes) -> bytes:
    """What was written once the live view was over: from where the cursor was last shown."""
    assert seen.rindex(SHOWN) > seen.rindex(HIDDEN), "the cursor was left hidden"
    return seen[seen.rindex(SHOWN) :]
