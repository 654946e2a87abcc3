"""The memory of a process while it loads a model for a CPU, against the bytes of its weights. The oracle is Linux."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import empty_weights, places

CONFIG = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512,
    "eos_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
SLACK = 16 << 20  # bytes: some rows in float32, the ends of huge pages, and what Python and the allocator keep
MOST = 1.15

LOADING = """
import gc, json, os, sys, torch
from pathlib import Path
from phase0_request.support.machine import give_back_freed_memory
from phase2_prefill_decode.connect import quantization
from phase2_prefill_decode.model import Model

def status(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def given(options):
    return {"dtype": options.get("dtype"), "transform": quantization(*options.get("quantization", [None]))}

def peak(directory, options, similar):
    Model.load(device="cpu", **given(similar))  # machine code that is loaded counts for no model
    gc.collect()
    give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    model = Model.load(directory, device="cpu", **given(options))
    return status("VmHWM") - before

torch.set_num_threads(1)  # a process that was forked has no other threads of its parent
for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        print(peak(*case), flush=True)
        os._exit(0)
    os.wait()
"""


def written(directory: Path, quantized: bool = False, **options: object) -> ModelConfig:
    """A model of numbers that do not matter."""
    described = CONFIG | options | ({"quantization_config": GPTQ} if quantized else {})
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(described))
    config = ModelConfig.from_pretrained(directory)
    tensors: dict[str, Tensor] = {}
    for name, place in places(empty_weights(config, "meta"), config).items():
        if quantized and name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + suffix: part for suffix, part in gptq(*place.shape)}
        else:
            tensors[name] = torch.full(place.shape, 0.01, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    return config


def gptq(out: int, inputs: int) -> Iterator[tuple[str, Tensor]]:
    groups = inputs // GPTQ["group_size"]
    yield "qweight", torch.randint(0, 1 << 30, (inputs // 8, out), dtype=torch.int32)
    yield "qzeros", torch.randint(0, 1 << 30, (groups, out // 8), dtype=torch.int32)
    yield "scales", torch.full((groups, out), 0.01, dtype=torch.float16)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what the peak was")
def test_loading_takes_hardly_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Whichever part is the largest: an embedding that is lm_head too, one that is not, or the layers. File pages that
    the process has mapped count."""
    tied = written(tmp_path / "tied", vocab_size=64_000, num_hidden_layers=2, tie_word_embeddings=True)
    apart = written(tmp_path / "apart", vocab_size=32_000, num_hidden_layers=2, tie_word_embeddings=False)
    written(tmp_path / "gptq", True, vocab_size=2_000, num_hidden_layers=20, tie_word_embeddings=True)
    all_quantized = {"quantization": ("int8", True)}
    cases: dict[str, tuple[str, dict[str, object], float]] = {
        "tied": ("tied", {}, tied.bytes),
        "tied, as float32": ("tied", {"dtype": "float32"}, 2 * tied.bytes),
        "tied, quantized": ("tied", all_quantized, tied.parameters),
        "apart": ("apart", {}, apart.bytes),
        "GPTQ": ("gptq", {}, (tmp_path / "gptq" / "model.safetensors").stat().st_size),
    }
    loads = [
        (str(tmp_path / directory), options, {"quantization": ("int4",)} if directory == "gptq" else options)
        for directory, options, _ in cases.values()
    ]
    ran = subprocess.run([sys.executable, "-c", LOADING, json.dumps(loads)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for (name, (*_, size)), peak in zip(cases.items(), map(int, ran.stdout.split()), strict=True):
        assert 0.8 * size < peak <= MOST * size + SLACK, f"{name}: {peak / size:.2f} times its weights"
