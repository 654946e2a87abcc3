"""The benchmark reads what other engines print, and those run the same workloads."""

import argparse
from pathlib import Path

import pytest
import torch

from phase2_prefill_decode.lab import bench
from phase2_prefill_decode.lab.bench import Workload, beside, peer_rates
from phase2_prefill_decode.lab.shapes import SHAPES
from tests.phase2_prefill_decode.tiny import TINY

PRINTED = """engine version v1.2.3
theirs requests=1 prompt=16 output=64 shared=0: 0.50 s, 128.0 output tok/s
theirs requests=1 prompt=16 output=64 shared=5: 0.01 s, 300.0 output tok/s
theirs requests=4 prompt=512 output=1: 2.00 s, 1.0 output tok/s
theirs requests=9 prompt=9 output=9: 9.00 s, 9.0 output tok/s
"""


def test_the_rates_of_a_peer_are_of_the_same_workloads(tmp_path: Path) -> None:
    """Tokens of the answers a second, or of the prompts if an answer is one token."""
    assert dict(peer_rates(PRINTED)) == {"1x16+64": 64 / 0.5, "4x512+1": 4 * 512 / 2.0}
    (tmp_path / "peer.txt").write_text(PRINTED)
    (tmp_path / "crashed.txt").write_text("it crashed")
    assert beside(f"17m:Theirs={tmp_path / 'peer.txt'}") == ("17m", "Theirs", PRINTED)
    for option in ("garbage", f"5t:x={tmp_path / 'peer.txt'}", f"17m:x={tmp_path / 'crashed.txt'}"):
        with pytest.raises(argparse.ArgumentTypeError):
            beside(option)


def test_both_engines_give_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "17m", TINY)
    bench.save_random("17m", tmp_path)
    ours, theirs = (make(tmp_path, torch.device("cpu")) for make in (bench.ours, bench.theirs))
    prompts = Workload(2, 5, 3).prompts(64, 0)
    for answers in (ours(prompts, 3), theirs(prompts, 3)):
        assert [len(answer) for answer in answers] == [3, 3]
    assert ours(prompts, 1) == theirs(prompts, 1)
