"""Class: files of a model that execute, crash or allocate when they are loaded.

Published cases: `torch.load` runs code even with weights_only (CVE-2025-32434, PyTorch), on tensors of a request
(CVE-2025-62164, vLLM), and `auto_map` imports code of the model (CVE-2026-22807, vLLM). Here only safetensors, JSON
and GGUF are read: test_weights refuses *.bin, test_config refuses auto_map. What remains are damaged files: each is
read, or refused with one clear error, whatever its bytes are and within a gigabyte.
"""

import json
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from phase0_request.extras.gguf_file import read_header
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.connect import config_of
from phase2_prefill_decode.extras.gguf.gguf import GGUFCheckpoint
from phase2_prefill_decode.loading.checkpoint import INDEX, SINGLE, Checkpoint
from tests.phase6_integration.adversarial.mutations import edits

ROOM = 1 << 30  # bytes beyond what the process has mapped already
LONGEST = 4000  # characters of an error
WEIGHTS = save({"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(3, 2, dtype=torch.bfloat16)})
HEADER = json.loads(WEIGHTS[8 : 8 + int.from_bytes(WEIGHTS[:8], "little")])
CONFIG = json.loads((BUNDLED / "config.json").read_text())
WEIGHTS_OF_4_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "block_structure": [128, 128]}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS_OF_4_BITS}},
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 0, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"<|end|>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """A limit on the address space: an allocation beyond it is a MemoryError, or the end of the process."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def text(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def read_gguf(directory: Path) -> None:
    header = read_header(directory / "model.gguf")
    GGUFCheckpoint(header)
    Tokenizer.from_pretrained(header.file)
    config_of(header.file)


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(28)


GGUF = (
    b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    + text(b"llama.block_count") + struct.pack("<II", 4, 2) + text(b"tokenizer.ggml.tokens")
    + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    + text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 32, 2, 8, 0) + bytes(100)
)  # fmt: skip
NUMBERS = st.one_of(st.integers(0, 255), st.integers(0, (1 << 64) - 1)).map(lambda number: number.to_bytes(8, "little"))


def overwritten(start: int, number: bytes) -> bytes:
    return GGUF[:start] + number + GGUF[start + len(number) :]


LENGTHS = st.integers(0, (1 << 64) - 1).map(lambda length: length.to_bytes(8, "little") + WEIGHTS[8:])
HEADERS = st.one_of(
    st.builds(overwritten, st.integers(0, len(GGUF)), NUMBERS), st.integers(0, 300).map(lambda n: GGUF[:n])
)
CASES: dict[str, tuple[str, st.SearchStrategy[bytes], Callable[[Path], object]]] = {
    "weights": (SINGLE, st.one_of(edits(HEADER).map(with_header), LENGTHS), Checkpoint),
    "index": (INDEX, edits({"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors"}}), Checkpoint),
    "config": ("config.json", edits(CONFIG), config_of),
    "tokenizer": ("tokenizer.json", edits(TOKENIZER), Tokenizer.from_pretrained),
    "gguf": ("model.gguf", HEADERS, read_gguf),
    "quantization": ("config.json", edits(CONFIG | {"quantization_config": QUANTIZED}), config_of),
}


@pytest.mark.parametrize("examples", [150, pytest.param(3_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CASES)
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path, examples: int) -> None:
    name, contents, load = CASES[kind]

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(contents)
    def loads_or_is_refused(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        try:
            load(tmp_path)
        except (ValueError, OSError) as error:
            message = str(error)
        else:
            message = "it was read"
        assert 0 < len(message) < LONGEST

    loads_or_is_refused()
