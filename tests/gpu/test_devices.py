"""The kernel tests of phases 1 to 3 on a GPU that is not there: see `pretend`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/phase1_kv_pool/test_store.py",
    "tests/phase2_prefill_decode/quantized/test_product.py",
    "tests/gpu/test_checks.py",
    *(f"tests/phase2_prefill_decode/test_{name}.py" for name in ("attention", "kernels", "mask", "pointwise", "draw")),
)
FEW = (  # of each kernel; all of them pass, and take minutes
    "table_of_splits_has_every or table_of_more_sequences or two_programs or mask_of_zeros"
    " or (triton and float32 and (padding_between or norm_is_that_of or swiglu or slots_and_nothing))"
    " or linear_of_a_gpu or (of_float64 and float16 and shape1)"
    " or sanitizer or threshold_of_a_filter or triton-float32-chunks_behind_16"
)


def test_kernels_get_tensors_of_their_device_and_are_launched_there(tmp_path: Path) -> None:
    """With a test that shows what one would that fails on a GPU alone: one process runs them all."""
    (tmp_path / "test_wrong.py").write_text(
        "import pytest, torch\n"
        "from phase2_prefill_decode.extras.grammar.triton_mask import TILE, apply_mask, apply_mask_kernel\n"
        "from tests.gpu.pretend import GPU\n"
        "def test_another_device_is_refused():\n"
        "    logits, rows = torch.ones(2, 40), torch.zeros(2, dtype=torch.int64)\n"
        "    bits = torch.zeros(1, 2, dtype=torch.int32)\n"
        "    on_gpu = [tensor.to(GPU) for tensor in (logits, bits, rows)]\n"
        "    assert apply_mask(*on_gpu).tolist() == [[-torch.inf] * 40] * 2\n"
        "    with pytest.raises(ValueError, match='got a tensor of the CPU'):\n"
        "        apply_mask(on_gpu[0], bits, on_gpu[2])\n"
        "    with pytest.raises(RuntimeError, match='on device 0, its tensors are on 1'):\n"
        "        apply_mask_kernel[(1, 1)](*[on_gpu[0], 40, *on_gpu[1:], on_gpu[0], 40, 2, TILE])\n"
        "    with pytest.raises(RuntimeError, match='tensors of the GPU and of the CPU'):\n"
        "        logits + on_gpu[0]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.pretend", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-k", f"another_device_is or {FEW}"]
    done = subprocess.run([*command, *FILES, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
