"""What stages leave, as a few files of the day."""

import random
from pathlib import Path

import pytest

from phase6_integration.lab.gpu import packing
from phase6_integration.lab.gpu.rows import work_folder


def test_what_is_packed_is_unpacked_on_a_fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PART", 1000)
    monkeypatch.setattr(packing, "CACHE", tmp_path / "cache")
    out, code = tmp_path / "day", random.Random(0).randbytes(2500)
    kernels, reports = packing.CACHE / "key", work_folder(out)
    for folder in (out, kernels, reports):
        folder.mkdir(parents=True)
    (kernels / "kernel.cubin").write_bytes(code)
    (kernels / "kernel.ttir").write_text("what was compiled")
    (reports / "tests.xml").write_text("<testsuites/>")
    packing.unpack(out)  # nothing is there
    for size in (4500, 2500):  # a later call replaces the parts of an earlier one
        (kernels / "kernel.cubin").write_bytes(random.Random(0).randbytes(size))
        for name, folder in packing.archives(out).items():
            row = packing.pack_folder(folder, out, name)
            sizes = [part.stat().st_size for part in packing.parts(out, name)]
            assert (row["packed"], row["files"], row["bytes"]) == (1, len(sizes), sum(sizes))
            assert max(sizes) <= 1000
    assert sorted(file.name for file in out.iterdir()) == [
        "reports.tar.gz.00", "triton.tar.gz.00", "triton.tar.gz.01", "triton.tar.gz.02",
    ]  # fmt: skip
    for folder in (packing.CACHE, reports):
        folder.rename(folder.with_suffix(".before"))
    packing.unpack(out)
    assert [file.name for file in kernels.iterdir()] == ["kernel.cubin"]
    assert (kernels / "kernel.cubin").read_bytes() == code
    assert (reports / "tests.xml").exists()
