"""Quantized checkpoints: what is read equals what the format's own library makes of it, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phase0_request.params import SamplingParams
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.loading.quantized.weight import QuantizedWeight
from phase2_prefill_decode.loading.weights import load_weights
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase2_prefill_decode.test_identity import follows, prompts

Case = tuple[Callable[[Tensor], made.Made], dict[str, Any]]


def shuffled(inputs: int) -> Tensor:
    """Groups of inputs from anywhere, the same for all matrices with as many inputs."""
    return (torch.arange(inputs) // made.GROUP)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


FORMATS: dict[str, Case] = {
    **{f"compressed {name}": (made.compressed(name), made.compressed_config(name)) for name in made.SCHEMES},
    "compressed float32": (made.compressed("fp8 block", torch.float32), made.compressed_config("fp8 block")),
    "gptq": (made.gptq(), made.gptq_config()),
    "gptq 8 bits": (made.gptq(8), made.gptq_config(bits=8)),
    "gptq v2": (made.gptq(version=2), made.gptq_config(checkpoint_format="gptq_v2")),
    "gptq symmetric": (made.gptq(symmetric=True), made.gptq_config(sym=True)),
    "gptq act-order": (made.gptq(group_of=shuffled), made.gptq_config(desc_act=True)),
    "gptq 8 bits act-order": (made.gptq(8, 2, shuffled), made.gptq_config(bits=8, checkpoint_format="gptq_v2")),
    "awq": (made.awq, made.AWQ_CONFIG),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def matrices(directory: Path) -> dict[str, Tensor]:
    """The matrices of a checkpoint as they are read, dequantized, by their names in it."""
    config = ModelConfig.from_pretrained(directory, "float32")
    read = {}
    for number, layer in enumerate(load_weights(directory, config).layers):
        for field, (modules, inputs, _) in config.layer.items():
            if inputs:
                weight = getattr(layer, field)
                parts = weight if isinstance(weight, tuple) else (weight,)
                assert all(isinstance(part, QuantizedWeight) for part in parts)
                rows = torch.cat([part.dequantize() for part in parts]).split(list(modules.values()))
                read |= zip([f"model.layers.{number}.{module}.weight" for module in modules], rows, strict=True)
    return read


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weights_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    make, config = FORMATS[name]
    wanted: dict[str, Tensor] = {}

    def noting(weight: Tensor) -> made.Made:
        parts, dequantized = make(weight)
        wanted[str(len(wanted))] = dequantized
        return parts, dequantized

    model = made.quantized(tmp_path, noting, config)
    named = dict(zip([n for n, _ in model.named_parameters() if made.is_quantized(n)], wanted.values(), strict=True))
    found = matrices(tmp_path)
    assert found.keys() == named.keys()
    for matrix, weight in named.items():
        assert found[matrix].dtype == weight.dtype
        assert torch.equal(found[matrix], weight), matrix


@pytest.mark.parametrize("name", ["compressed int8", "compressed int4 zeros", "gptq act-order", "awq"])
def test_an_engine_answers_as_transformers_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    oracle = made.quantized(tmp_path, *FORMATS[name], family="llama")
    engine = static(Model.load(tmp_path, dtype="float32", device="cpu"))
    asked = prompts(307, (3, 17))
    answers = engine.generate(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(asked, answers, strict=True))
