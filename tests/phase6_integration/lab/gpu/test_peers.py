"""The peers' clock: transformers makes and warms its manager before it starts."""

from pathlib import Path
from typing import Any

import pytest

from phase6_integration.lab.gpu import serving
from phase6_integration.lab.gpu.rows import Day


def test_the_manager_on_the_clock_is_the_one_that_was_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    made, started, timed = [], [], []
    real, real_start, answered = ContinuousBatchingManager.__init__, ContinuousBatchingManager.start, serving.answered

    def make(self: Any, *arguments: Any, **more: Any) -> None:
        made.append(self)
        real(self, *arguments, **more)

    def start(self: Any) -> None:
        started.append((self, self.warmed_up, self.input_queue.qsize()))
        real_start(self)

    def clocked(manager: Any, missing: int) -> int:
        timed.append((manager, len(made)))
        return answered(manager, missing)

    monkeypatch.setattr(ContinuousBatchingManager, "__init__", make)
    monkeypatch.setattr(ContinuousBatchingManager, "start", start)
    monkeypatch.setattr(serving, "answered", clocked)
    row = serving.transformers(Day("beside", True, tmp_path), "tiny", 2, 8, 3)
    assert row["tokens"] == 2 * 3
    assert timed == [(made[0], 1)]
    assert len(made) == 1
    assert started[-1] == (made[0], True, 2), "all prompts are queued when the clock starts"
