"""Quantization at load: numbers near the weight's, and a model that answers nearly as before."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.extras.quantized.layout import SCHEMES, bytes_in
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.extras.streams import weights_for_gpu
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights
from phase2_prefill_decode.model import Model
from tests.differences import difference
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.quantized import checkpoints as made

ERRORS = {"int8": 0.01, "fp8": 0.03, "int4": 0.09}  # of normal numbers, relative


def weights(out: int = 96, inputs: int = 256) -> Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(0)) / 30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_is_that_of_so_many_bits(scheme: str) -> None:
    weight = weights().bfloat16()
    quantized = quantize(weight, scheme)
    assert (quantized.shape, quantized.dtype) == (weight.shape, torch.bfloat16)
    assert quantized.nbytes == {"int4": weight.numel() * 18 // 32}.get(scheme, weight.numel() + 4 * len(weight))
    error = quantized.dequantize().float() - weight.float()
    relative = float(error.norm() / weight.float().norm())
    assert relative < ERRORS[scheme], f"in {scheme} the weights are off by {relative:.1%}, and {ERRORS[scheme]:.0%} do"


def test_int8_is_the_nearest_number_of_each_row() -> None:
    """The largest is 127, and none is half a step away."""
    weight = weights()
    quantized = quantize(weight, "int8")
    largest = quantized.values.abs().amax(1)
    assert not difference(largest, torch.full_like(largest, 127), "row"), "the largest integer of a row"
    steps = (quantized.dequantize() - weight).abs() / quantized.scales
    assert float(steps.max()) <= 0.5001, "a weight is more than half a step from its integer"


def test_int4_searches_for_a_scale_with_a_smaller_error_than_the_largest_number_gives() -> None:
    weight = weights()
    grouped = weight.unflatten(1, (-1, 32))
    scales = grouped.abs().amax(2, keepdim=True) / 7
    nearest = ((grouped / scales).round().clamp(-8, 7) * scales).flatten(1)
    found = quantize(weight, "int4").dequantize().float()
    ratio = float((found - weight).square().sum() / (nearest - weight).square().sum())
    assert ratio < 0.8, f"the squared error is {ratio:.2f} times that of one scale, the largest number by 7"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("special", [0.0, 1e-30, 3e4])
def test_rows_of_zeros_and_of_extreme_numbers_stay_finite(scheme: str, special: float) -> None:
    weight = weights(4, 64)
    weight[1] = special
    dequantized = quantize(weight, scheme).dequantize().float()
    assert bool(dequantized.isfinite().all())
    torch.testing.assert_close(dequantized[1], weight[1], rtol=0.02, atol=1e-30)


def test_matrices_of_layers_are_quantized_and_nothing_else(tmp_path: Path) -> None:
    saved(tiny_model("qwen3", intermediate_size=96), tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    source, device = Checkpoint(tmp_path), torch.device("cpu")
    plain = load_weights(source, config)
    weights = weights_for_gpu(Quantization("int8")(source, config, device), config, device)
    for name in ("embed_tokens", "norm", "lm_head"):
        assert torch.equal(getattr(weights, name), getattr(plain, name))
    for layer, before in zip(weights.layers, plain.layers, strict=True):
        for field, (_, inputs, _) in config.layers[0].tensors(config).items():
            found, wanted = layer[field], before[field]
            assert isinstance(found, QuantizedWeight) == bool(inputs)
            assert torch.equal(found.values, quantize(wanted, "int8").values) if inputs else torch.equal(found, wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_does_not_fit_says_how_large_it_is_in_each_scheme(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are those of the weights, without the scales of whole rows."""
    saved(tiny_model("llama", hidden_size=512, intermediate_size=1024, dtype=torch.bfloat16), tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    device = torch.device("cpu")
    layers = weights_for_gpu(Quantization(scheme)(Checkpoint(tmp_path), config, device), config, device).layers
    size = sum(matrix.nbytes for layer in layers for matrix in layer.values()) + 2 * (2 * 307 + 1) * 512
    assert size * 0.99 < bytes_in(config, scheme) <= size
    monkeypatch.setattr("phase2_prefill_decode.loading.weights.free_bytes", lambda device: bytes_in(config, scheme) - 1)
    with pytest.raises(ConfigError, match=r"the model does not fit: .* 0.0 in int8, 0.0 in int4, 0.0 in fp8"):
        Model.load(tmp_path, transform=Quantization(scheme), device="cpu")
    monkeypatch.setattr("phase2_prefill_decode.loading.weights.free_bytes", lambda device: bytes_in(config, scheme))
    Model.load(tmp_path, transform=Quantization(scheme), device="cpu")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    made.quantized(tmp_path, made.awq, made.AWQ_CONFIG)
    with pytest.raises(ConfigError, match="is quantized already; quantization=int8 is for other models"):
        Model.load(tmp_path, transform=Quantization("int8"), device="cpu")


def test_a_scheme_that_does_not_exist_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path)  # its intermediate size is 80
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, fp8, got 'int2'"):
        Model.load(tmp_path, transform=Quantization("int2"), device="cpu")
    with pytest.raises(ValueError, match="int4 needs a multiple of 32 inputs, and a matrix has 80"):
        Model.load(tmp_path, transform=Quantization("int4"), device="cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings_are_quantized_if_asked(scheme: str, tied: bool, tmp_path: Path) -> None:
    """The embedding of a token is then a dequantized row; a tied head is the same weight, kept once."""
    model = tiny_model("qwen3", intermediate_size=96, tie_word_embeddings=tied, dtype=torch.bfloat16)
    saved(model, tmp_path)
    loaded = Model.load(tmp_path, transform=Quantization(scheme, embeddings=True), device="cpu")
    table, tokens = loaded.decoder.embed_tokens, torch.tensor([3, 0, 306, 3])
    assert not isinstance(table, Tensor)
    assert (table is loaded.decoder.lm_head) == tied
    wanted = quantize(model.model.embed_tokens.weight.detach(), scheme).dequantize()[tokens]
    assert torch.equal(table.rows(tokens, torch.bfloat16), wanted.bfloat16())
    (answer,) = static(loaded).generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert len(answer.output_tokens) == 2


@pytest.mark.parametrize(
    ("fault", "words"), [("", ""), ("another head", "lm_head.weight differs"), ("integers", "holds I32")]
)
def test_weights_are_checked_as_they_are_stored(tmp_path: Path, fault: str, words: str) -> None:
    """A tied model may store its head, too: the same one."""
    saved(tiny_model("qwen3", tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding, query = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
    tensors["lm_head.weight"] = tensors[embedding] + (fault == "another head")
    tensors[query] = tensors[query].int() if fault == "integers" else tensors[query]
    save_file(tensors, tmp_path / "model.safetensors")
    load = partial(Model.load, tmp_path, device="cpu", transform=Quantization("int8", embeddings=True))
    if fault:
        with pytest.raises(ConfigError, match=words):
            load()
    else:
        assert load().config.tie_word_embeddings
