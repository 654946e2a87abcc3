"""What the stages of `gpu_day` share: the device, the models, and the folder to which they append rows.

A row has a key: what was measured. It is appended as soon as it is there, so a cut loses the row in progress and no
other, and the next call measures what the folder does not have.
"""

import gc
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phase1_kv_pool.lab.timing import clock_seconds, replay_seconds
from phase2_prefill_decode.lab.models.published import PUBLISHED
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase5_continuous.lab.simulator import MODELS

TINY = ModelConfig(
    model_type="qwen3", vocab_size=128, num_hidden_layers=2, hidden_size=32, intermediate_size=64,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_norm=True, max_position_embeddings=256,
    dtype="float32",
)  # fmt: skip
SHRUNK: dict[str, Any] = {  # what a dry run changes in a published shape
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 64, "block_ff_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1], "max_position_embeddings": 256,
}  # fmt: skip
Row = dict[str, Any]
UNFINISHED = "the process ended"  # the error of a row that has begun and not ended


class Rows:
    """The rows of all stages in one file of JSON lines. A later row with the same key replaces an earlier one."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rows.jsonl"

    def append(self, stage: str, key: Row, figures: Row) -> Row:
        """Add a row and return it as it will be read: JSON has no NaN and no infinity, so they are null."""
        text = json.dumps({"stage": stage, "key": key, "figures": figures}, default=float)
        row: Row = json.loads(text, parse_constant=lambda name: None)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return {**row["key"], **row["figures"]}

    def of(self, stage: str) -> dict[str, Row]:
        """The stage's rows, each its key and its figures, by a name made of its key, which a page can quote."""
        return {named(row["key"]): row["key"] | row["figures"] for row in self._read() if row["stage"] == stage}

    def get(self, stage: str, key: Row) -> Row | None:
        """The row with this key."""
        wanted = json.loads(json.dumps(key))
        rows = (row for row in self._read() if (row["stage"], row["key"]) == (stage, wanted))
        return next(({**row["key"], **row["figures"]} for row in rows), None)

    def forget(self, stage: str, finished: bool) -> None:
        """Remove the stage's rows that failed, and if asked the finished ones; and a last line that was cut."""
        rows = [row for row in self._read() if row["stage"] != stage or not (finished or "error" in row["figures"])]
        self.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def _read(self) -> list[Row]:
        text = self.file.read_text("utf-8") if self.file.exists() else ""
        whole, _, _ = text.rpartition("\n")
        rows = map(json.loads, whole.splitlines())
        return list({(row["stage"], json.dumps(row["key"], sort_keys=True)): row for row in rows}.values())


def named(key: Row) -> str:
    """The name of a row with this key."""
    return re.sub(r"\W", "_", "_".join(map(str, key.values())))


@dataclass(frozen=True, slots=True)
class Day:
    """What a stage needs: its name, the device, the folder of the day, and which rows are wanted."""

    stage: str
    dry: bool
    out: Path
    wanted: str = ""  # a regular expression that is found in the name of each row

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def models(self) -> dict[str, ModelConfig]:
        return {"tiny": TINY} if self.dry else {"0.6b": SHAPES["596m"], "8b": MODELS["8b"]}

    def config(self, model: str) -> ModelConfig:
        """The configuration of one of these models, or of a published one."""
        if model in self.models:
            return self.models[model]
        shape = PUBLISHED[model]
        shrunk = {name: value for name, value in SHRUNK.items() if name in shape}
        return ModelConfig.from_dict({**shape, **(shrunk if self.dry else {})}, "float32" if self.dry else "bfloat16")

    def some(self, all: Sequence[Any], dry: Sequence[Any]) -> Sequence[Any]:
        return dry if self.dry else all

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        """The seconds of a call on the device: on a GPU from a graph, without the host."""
        return clock_seconds([call]) if self.dry else replay_seconds([call] * times)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def add(self, measure: Callable[[], Row], **key: Any) -> Row | None:
        """Append a row with what `measure` returns, unless the folder has it: then return that. None if it failed, or
        is not wanted.

        What fails is a row with its error, and so is a row that ends the process: then the stage is started again and
        goes on behind it. The next `gpu_day` forgets failed rows and measures them again."""
        if not re.search(self.wanted, named(key)):
            return None
        rows = Rows(self.out)
        if (row := rows.get(self.stage, key)) is None:
            rows.append(self.stage, key, {"error": UNFINISHED})
            try:
                row = rows.append(self.stage, key, measure())
            except Exception as error:
                said = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
                row = rows.append(self.stage, key, {"error": said[:400]})
            gc.collect()
            if not self.dry:
                torch.cuda.empty_cache()  # raises where the device can be used no more
        return None if "error" in row else row
