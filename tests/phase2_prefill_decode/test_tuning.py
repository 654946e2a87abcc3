"""The tuning of the decode kernel: its defaults, its search with a fake timer, and its file."""

import json
import math
from pathlib import Path

import pytest
import torch

from phase2_prefill_decode.kernels.triton.tuning import Key, Tuning, default, file_for, read, tuned, write
from phase2_prefill_decode.lab import tune

SHAPE = Key(head_dim=128, group=4, page_size=16)


@pytest.mark.parametrize(("group", "chunk"), [(1, 128), (4, 256), (7, 448), (8, 512), (71, 512)])
def test_the_default_split_is_longer_the_more_heads_share_its_keys(group: int, chunk: int) -> None:
    assert default(group).chunk == chunk
    assert 2 * group / chunk <= 1 / 32 or chunk == 512, "traffic of the join"


def test_the_search_keeps_the_candidate_that_is_best_over_all_batches() -> None:
    wanted = Tuning(128, 32, 4, 4)

    def seconds(shape: Key, tuning: Tuning, batch: tuple[int, int]) -> float:
        assert shape == SHAPE
        if tuning.num_warps == 8:
            return math.inf  # does not fit
        if tuning == Tuning(512, 64, 4, 3):
            return 0.1 if batch == (256, 1536) else 20.0  # best at the largest batch alone
        return 1.0 if tuning == wanted else 2.0

    assert tune.best(SHAPE, seconds) == (wanted, pytest.approx(2.0))


def test_a_tuning_file_is_read_back(tmp_path: Path) -> None:
    file, tunings = tmp_path / "new" / "it.json", {SHAPE: Tuning(128, 32, 4, 4), Key(64, 8, 64): Tuning(512, 64, 4, 2)}
    write(file, "A GPU", tunings)
    assert read(file, "A GPU") == tunings
    assert read(tmp_path / "none.json", "A GPU") == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 100}, "chunk must be one of 128, 256, 512, 1024, 2048, got 100"),
        ({"tile": "64"}, "tile must be one of 16, 32, 64, 128, got '64'"),
        ({"num_warps": 3}, "num_warps must be one of 1, 2, 4, 8, got 3"),
        ({"group": 0}, "a shape is three numbers of at least 1, got .*'group': 0"),
        ({"page_size": None}, "a shape is three numbers of at least 1"),
    ],
)
def test_a_row_that_cannot_be_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write(file := tmp_path / "it.json", "A GPU", {SHAPE: Tuning(128, 32, 4, 4)})
    content = json.loads(file.read_text())
    content["decode"][0] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"it\.json is no tuning of the decode kernel: {message}.*; delete it, or"):
        read(file, "A GPU")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "list indices must be"),
        ('{"device": "Another", "decode": []}', "it is for Another, this is A GPU"),
        ('{"device": "A GPU"}', "has no 'decode'"),
        ('{"device": "A GPU", "decode": [{"chunk": 128}]}', "has no 'tile'"),
    ],
)
def test_a_file_of_another_form_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "it.json", "A GPU")


def test_the_file_of_a_device_serves_its_shapes_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    write(file_for("A GPU"), "A GPU", {SHAPE: Tuning(128, 32, 4, 4)})
    gpu = torch.device("cuda", 7)
    tuned.cache_clear()
    assert tuned(gpu, SHAPE, 2) == Tuning(128, 32, 4, 4)
    assert tuned(gpu, SHAPE, 4) == tuned(gpu, Key(128, 4, 64), 2) == tuned(torch.device("cpu"), SHAPE, 2) == default(4)
    tuned.cache_clear()
