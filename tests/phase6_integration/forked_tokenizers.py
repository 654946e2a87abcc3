"""Tokenizer processes that are forked from one which has imported what they need: a tenth of the time of a start."""

import contextlib
import os
import signal
import socket
import sys
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess

from phase6_integration.process import tokenizer_process

FORKSERVER = get_context("forkserver")
FORKSERVER.set_forkserver_preload(["transformers.utils.chat_template_utils"])


class ForkedProcess(ForkServerProcess):
    """As much of a Popen as a TokenizerProcess needs."""

    def wait(self) -> None:
        self.join()


def spawn(end: socket.socket) -> ForkedProcess:
    """In place of `TokenizerProcess._spawn`."""
    with end:
        process = ForkedProcess(target=serve, args=(end,), daemon=True)
        process.start()
    return process


def serve(end: socket.socket) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.argv[1:] = [str(end.detach())]
    with contextlib.suppress(EOFError, ConnectionError):
        tokenizer_process.main()
