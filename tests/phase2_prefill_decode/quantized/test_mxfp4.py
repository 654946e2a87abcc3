"""MXFP4 checkpoints of gpt-oss: what is read equals what transformers makes of it, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.connect import config_of, source_of
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.model import Model
from tests.gguf_files import saved_gguf
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase2_prefill_decode.test_identity import follows, prompts

EXPERTS = ".mlp.experts."
SIZES: dict[str, Any] = {
    "head_dim": 16, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
}  # fmt: skip


def packed(shape: torch.Size, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random blocks and scales for [experts, inputs, outputs]: every number of 4 bits, and sizes as of a matrix."""
    experts, inputs, outputs = shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, blocks.shape[:3], generator=draw, dtype=torch.uint8)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Any, Path]:
    """transformers' model with dequantized experts, and a directory in which they are packed."""
    oracle, draw = tiny_model("gpt_oss", **SIZES), torch.Generator().manual_seed(5)
    saved(oracle, tmp_path)
    tensors, parameters = load_file(tmp_path / "model.safetensors"), dict(oracle.named_parameters())
    for name in [name for name in tensors if EXPERTS in name and not name.endswith("_bias")]:
        blocks, scales = packed(tensors.pop(name).shape, draw)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return oracle, tmp_path


def test_every_number_is_what_transformers_reads(checkpoint: tuple[Any, Path]) -> None:
    oracle, directory = checkpoint
    source = source_of(directory, config_of(directory))
    for layer, module in enumerate(oracle.model.layers):
        wanted = module.mlp.experts
        for expert in range(SIZES["num_local_experts"]):
            gate_up, down = wanted.gate_up_proj[expert].t(), wanted.down_proj[expert].t()
            for part, matrix in {"gate_proj": gate_up[::2], "up_proj": gate_up[1::2], "down_proj": down}.items():
                (found,) = source.chunks(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight")
                assert isinstance(found, QuantizedWeight)
                assert torch.equal(found.dequantize().float(), matrix)


def test_a_packed_model_answers_as_its_dequantized_one_in_transformers(checkpoint: tuple[Any, Path]) -> None:
    oracle, directory = checkpoint
    with_rows_in_8_bits(oracle)
    assert_same_answers(oracle, Model.load(directory, device="cpu", dtype="float32"))


def test_a_gguf_file_answers_as_its_dequantized_model_in_transformers(tmp_path: Path) -> None:
    """Its experts in MXFP4, as llama.cpp's package writes it."""
    oracle = tiny_model("gpt_oss", **SIZES)
    saved_gguf(oracle, tmp_path / "model.gguf", lambda name: "MXFP4" if EXPERTS in name else "F32")
    with_rows_in_8_bits(oracle)
    assert_same_answers(oracle, Model.load(tmp_path / "model.gguf", device="cpu", dtype="float32"))


def with_rows_in_8_bits(oracle: Any) -> None:
    """The rows of the experts' products, as a CPU multiplies them with integers."""
    for layer in oracle.model.layers:
        experts = layer.mlp.experts
        activated = experts._apply_gate
        experts.register_forward_pre_hook(lambda _, rows: (made.in_8_bits(rows[0], 32).float(), *rows[1:]))
        experts._apply_gate = lambda rows, activated=activated: made.in_8_bits(activated(rows), 32).float()


def assert_same_answers(oracle: Any, model: Model) -> None:
    given = prompts(oracle.config.vocab_size)
    answers = static(model).generate(given, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert all(len(answer.output_tokens) == 24 for answer in answers)
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(given, answers, strict=True))


def test_blocks_without_their_scales_are_refused(checkpoint: tuple[Any, Path]) -> None:
    _, directory = checkpoint
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks and .*_scales do not fit"):
        Model.load(directory, device="cpu")
