"""Launches of Triton kernels: the variant that is launched is the one that Triton would have chosen."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from phase1_kv_pool.lab.no_device import LAUNCHES, use_no_device

use_no_device()
import torch
import triton.language as tl
from phase1_kv_pool.kernels.triton.launch import JITFunction, jit


@jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["index"])
def kernel(x, index, other, stride, n, scale, width: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, width)
    value = tl.load(x + at, mask=at < n, other=0.0) * scale + tl.load(index + at, mask=at < n, other=0)
    if other is not None:
        value += tl.load(other + at, mask=at < n, other=0.0)
    tl.store(x + at, value, mask=at < n)


def arguments(dtype=torch.float32, at=0, index_at=0, other=True, stride=16, n=32, scale=1.0, width=32, **options):
    x = torch.zeros(80, dtype=dtype)[at:]
    index = torch.zeros(80, dtype=torch.int32)[index_at:]
    return (x, index, torch.zeros(80) if other else None, stride, n, scale), {"width": width, **options}


ASKED = [
    {}, {"dtype": torch.float16}, {"at": 1}, {"at": 4}, {"index_at": 1}, {"other": False}, {"stride": 1}, {"stride": 7},
    {"stride": 1 << 40}, {"n": 1}, {"n": 1 << 20}, {"scale": 0.5}, {"width": 64}, {"num_warps": 8}, {"at": 1, "n": 5},
]
found = []
for times in range(3):
    for asked in ASKED:
        positional, constants = arguments(**asked)
        by_triton = JITFunction.run(kernel, *positional, grid=(2,), warmup=False, **constants)
        assert kernel[(2,)](*positional, **constants) is by_triton, asked
        found.append(by_triton)
assert LAUNCHES[kernel.__name__] == 2 * len(found), LAUNCHES
assert len(set(map(id, found))) == 9, len(set(map(id, found)))

run = JITFunction.run
def counted(self, *args, **options):
    counted.times += 1
    return run(self, *args, **options)
counted.times = 0
JITFunction.run = counted
for asked in ASKED:
    positional, constants = arguments(**asked)
    kernel[(2,)](*positional, **constants)
assert counted.times == 2, "Triton chooses only where a pointer is not aligned"
print("ok")
"""


def test_each_launch_is_of_the_variant_that_triton_chooses(tmp_path: Path) -> None:
    """With a driver that has no device: alignments, types, ones, missing tensors, constants and options."""
    file = tmp_path / "program.py"  # Triton reads the source of a kernel
    file.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "TRITON_CACHE_DIR": f"{tmp_path / 'cache'}"}
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr[-2000:]
