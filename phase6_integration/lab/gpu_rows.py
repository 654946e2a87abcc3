"""What the stages of `gpu_day` share: the device and its ceilings, the models, and the rows that they write."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from phase1_kv_pool.lab.timing import clock_seconds, replay_seconds
from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase5_continuous.lab.simulator import MODELS

TINY = ModelConfig(
    model_type="qwen3", vocab_size=128, num_hidden_layers=2, hidden_size=32, intermediate_size=64,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_norm=True, max_position_embeddings=256,
    dtype="float32",
)  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 50, "top_p": 0.9},
}


@dataclass(slots=True)
class Day:
    """What a stage needs: the device, and a file to which rows are appended at once, so that a cut loses none."""

    dry: bool
    file: TextIO

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def models(self) -> dict[str, ModelConfig]:
        return {"tiny": TINY} if self.dry else {"0.6b": SHAPES["596m"], "8b": MODELS["8b"]}

    def some(self, all: Sequence[Any], dry: Sequence[Any]) -> Sequence[Any]:
        return dry if self.dry else all

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        """The seconds of a call on the device: on a GPU from a graph, without the host."""
        return clock_seconds([call]) if self.dry else replay_seconds([call] * times)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    @contextmanager
    def row(self, **found: Any) -> Iterator[dict[str, Any]]:
        """A row of the stage. What fails is a row too, and the stage goes on."""
        try:
            yield found
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:400]
        self.file.write(json.dumps(found, default=float) + "\n")
        self.file.flush()
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def limits(day: Day) -> dict[str, float]:
    """What this device can do at best: bytes copied and read, and matrix products."""
    if day.dry:
        ceilings.SIZES, ceilings.OUT_OF_CACHE, ceilings.WIDTH = {"cpu": (16, 24, 32)}, {"cpu": 1 << 20}, 256
    best: dict[str, float] = ceilings.measure(day.device)["best"]
    return best
