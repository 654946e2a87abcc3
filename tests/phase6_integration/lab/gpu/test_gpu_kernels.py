"""What the stage of kernels compares with: torch's backends one by one, and logits that a model could have."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from phase2_prefill_decode.kernels.triton.draw import BLOCK, CANDIDATES
from phase6_integration.lab.gpu import kernels
from phase6_integration.lab.gpu.rows import Day

VOCABULARY = 151_936
CPU = torch.device("cpu")


@pytest.fixture
def day(tmp_path: Path) -> Day:
    return Day("kernels", True, tmp_path)


def test_a_backend_that_refuses_has_its_reason_and_the_fastest_one_is_taken(
    day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = kernels.sdpa(day, tokens=8, group=2)
    assert row["cudnn_attention"]["us"] is None
    assert "expanded: No viable backend" in row["cudnn_attention"]["refused"]
    assert (row["best"], row["us"]) == ("flash_attention", row["flash_attention"]["us"])
    times = {SDPBackend.CUDNN_ATTENTION: 1.0, SDPBackend.FLASH_ATTENTION: 2.0, SDPBackend.EFFICIENT_ATTENTION: None}
    monkeypatch.setattr(kernels, "forced", lambda day, backend, q, k, v: {"us": times[backend]})
    assert (kernels.sdpa(day, 8, 2)["best"], kernels.sdpa(day, 8, 2)["us"]) == ("cudnn_attention", 1.0)


@pytest.mark.parametrize(("make", "inside"), [(kernels.peaked, True), (kernels.flat, False)])
def test_only_a_nucleus_of_peaked_logits_is_among_the_candidates(
    make: Callable[[int, int, torch.device], Tensor], inside: bool
) -> None:
    """The kernel for top-p looks among the tokens above the bound of seven blocks in eight. If these are too many, or
    too few for the nucleus, it searches the whole row."""
    torch.manual_seed(0)
    (logits,) = make(1, VOCABULARY, CPU).float()
    blocks = -(-VOCABULARY // BLOCK)
    maxima = torch.nn.functional.pad(logits, (0, blocks * BLOCK - VOCABULARY), value=-torch.inf).view(blocks, BLOCK)
    bound = maxima.amax(1).sort(descending=True).values[blocks - blocks // 8 - 1]
    weights = logits.softmax(0)
    candidates = logits >= bound
    assert (int(candidates.sum()) <= CANDIDATES and float(weights[candidates].sum()) >= 0.9) is inside


def test_each_call_of_attention_reads_another_layer_with_one_plan(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Attend:
        @staticmethod
        def on(device: torch.device) -> Callable[..., Tensor]:
            def attend(query: Tensor, keys: Tensor, values: Tensor, metadata: object, *_: object) -> Tensor:
                seen.append((keys.data_ptr(), id(metadata)))
                return query

            return attend

    monkeypatch.setattr(kernels, "ATTEND", Attend)
    call, read, _ = kernels.attention(day, [(1, 70)] * 3, 16, 2)
    call(), call(), call()
    assert seen[0][0] != seen[1][0]
    assert seen[0] == seen[2]
    assert len({metadata for _, metadata in seen}) == 1
    assert read == 3 * 70 * 2 * 16 * 2 * 4  # tokens x KV heads x size x (keys and values) x bytes
