"""Triton's cache as files of the day."""

import random
from pathlib import Path

import pytest

from phase6_integration.lab.gpu import cache


def test_what_is_packed_is_unpacked_on_a_fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PART", 1000)
    before, out, after = (tmp_path / name for name in ("before", "out", "after"))
    (before / "key").mkdir(parents=True)
    out.mkdir()
    code = random.Random(0).randbytes(2500)
    (before / "key" / "kernel.cubin").write_bytes(code)
    (before / "key" / "kernel.json").write_text("{}")
    (before / "key" / "kernel.ttir").write_text("what was compiled")
    assert not cache.unpack(out, after)
    for _ in range(2):  # a later call replaces the parts of an earlier one
        row = cache.pack_folder(before, out)
        sizes = [part.stat().st_size for part in cache.parts(out)]
        assert (row["packed"], row["files"], row["bytes"]) == (2, len(sizes), sum(sizes))
        assert len(sizes) == 3
        assert max(sizes) <= 1000
    assert cache.unpack(out, after)
    assert {file.name: file.read_bytes() for file in (after / "key").iterdir()} == {
        "kernel.cubin": code,
        "kernel.json": b"{}",
    }
    (after / "key" / "kernel.cubin").write_bytes(b"newer")
    assert not cache.unpack(out, after)
    assert (after / "key" / "kernel.cubin").read_bytes() == b"newer"
