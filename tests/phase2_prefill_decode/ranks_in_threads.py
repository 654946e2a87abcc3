"""The ranks of a model as threads of this process, with the same sockets, commands and collectives."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from phase2_prefill_decode.extras.parallel import load, worker
from phase2_prefill_decode.extras.parallel.load import load_split
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.model import Model


class RanksInThreads(Ranks):
    """Each thread ends when its socket is closed."""

    def _start(self, rank: int, theirs: Connection) -> None:
        end = Connection(os.dup(theirs.fileno()))

        def follow() -> None:
            with end:
                try:
                    worker.follow(end, rank)
                except ValueError as error:  # as its process would say it
                    end.send_bytes(json.dumps({"error": str(error)}).encode())

        threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def split(directory: Path, ranks: int, **options: Any) -> Iterator[Model]:
    """A model in float32 over some ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Ranks", RanksInThreads)
        model = load_split(directory, ranks, device="cpu", **{"dtype": "float32", **options})
    assert model.decoder.processes is not None
    try:
        yield model
    finally:
        model.decoder.processes.close()
