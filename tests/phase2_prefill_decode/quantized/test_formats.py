"""Quantized checkpoints: what is read equals what the format's own library makes of it, bit for bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.connect import config_of, source_of
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.extras.streams import weights_for_gpu
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model
from tests.differences import difference
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase2_prefill_decode.test_hybrids import VARIANTS as HYBRIDS
from tests.phase2_prefill_decode.test_identity import follows, prompts

Case = tuple[Callable[[Tensor], made.Made], dict[str, Any]]


def shuffled(inputs: int) -> Tensor:
    """Groups of inputs from anywhere, the same for all matrices with as many inputs."""
    return (torch.arange(inputs) // made.GROUP)[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


def compressed(name: str, scale_dtype: torch.dtype = torch.bfloat16) -> Case:
    return made.compressed(name, scale_dtype), made.compressed_config(name)


FORMATS: dict[str, Callable[[], Case]] = {
    **{f"compressed {name}": partial(compressed, name) for name in made.SCHEMES},
    "compressed float32": lambda: compressed("fp8 block", torch.float32),
    "gptq": lambda: (made.gptq(), made.gptq_config()),
    "gptq 8 bits": lambda: (made.gptq(8), made.gptq_config(bits=8)),
    "gptq v2": lambda: (made.gptq(version=2), made.gptq_config(checkpoint_format="gptq_v2")),
    "gptq symmetric": lambda: (made.gptq(symmetric=True), made.gptq_config(sym=True)),
    "gptq act-order": lambda: (made.gptq(group_of=shuffled), made.gptq_config(desc_act=True)),
    "gptq 8 bits act-order": lambda: (
        made.gptq(8, 2, shuffled),
        made.gptq_config(bits=8, checkpoint_format="gptq_v2"),
    ),
    "awq": lambda: (made.awq, made.AWQ_CONFIG),
}

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def matrices(directory: Path) -> dict[str, Tensor]:
    """The matrices of a checkpoint as they are read, dequantized, by their names in it."""
    config = ModelConfig.from_pretrained(directory, "float32")
    read = {}
    for number, layer in enumerate(weights_for_gpu(source_of(directory, config), config, CPU).layers):
        for field, (modules, inputs, _) in config.layers[number].tensors(config).items():
            if inputs:
                weight = layer[field]
                parts = weight if isinstance(weight, tuple) else (weight,)
                assert all(isinstance(part, QuantizedWeight) for part in parts)
                rows = torch.cat([part.dequantize() for part in parts]).split(list(modules.values()))
                read |= zip([f"model.layers.{number}.{module}.weight" for module in modules], rows, strict=True)
    return read


def test_the_scales_of_a_kv_cache_are_not_used(tmp_path: Path) -> None:
    """Those of a checkpoint are one for a layer, from sample data. The pool measures one for each head of a token."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    make, config = compressed("fp8")
    made.quantized(tmp_path, make, config | {"kv_cache_scheme": scheme})
    without = matrices(tmp_path)
    scales = {f"model.layers.0.self_attn.{side}_scale": torch.ones(1, dtype=torch.bfloat16) for side in "kv"}
    save_file(load_file(tmp_path / "model.safetensors") | scales, tmp_path / "model.safetensors")
    found = matrices(tmp_path)
    assert all(torch.equal(found[name], weight) for name, weight in without.items())


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weights_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    make, config = FORMATS[name]()
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
        assert not difference(found[matrix], weight, "output", "input"), (
            f"{name}: {matrix} is not what the library reads"
        )


@pytest.fixture
def short_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of 6 bits: no dequantized number is rounded, so it does not matter when a kernel multiplies with them."""
    monkeypatch.setattr(made, "random_scales", lambda *shape: (torch.randint(16, 64, shape) / 2048).half())


EXACT: dict[str, Callable[[], Case]] = {
    "compressed int8": lambda: compressed("int8", torch.float32),
    "compressed int4 zeros": lambda: compressed("int4 zeros", torch.float32),
    "gptq act-order": FORMATS["gptq act-order"],
    "awq": FORMATS["awq"],
}


GATED = HYBRIDS["qwen3.5"][1] | {"num_hidden_layers": 4, "linear_value_head_dim": 16}  # q_proj has queries and gates


@pytest.mark.usefixtures("short_scales")
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("name", EXACT)
def test_an_engine_answers_as_transformers_with_the_dequantized_weights(name: str, family: str, tmp_path: Path) -> None:
    options = GATED if family == "qwen3_5_text" else {}
    oracle = made.quantized(tmp_path, *EXACT[name](), family=family, **options)
    act_order = lambda _, inputs: shuffled(inputs).argsort(stable=True)  # noqa: E731
    group = 1 << 20 if name == "compressed int8" else made.GROUP
    made.with_rows_in_8_bits(oracle, lambda name: group * made.is_quantized(name), act_order if "act" in name else None)
    engine = static(Model.load(tmp_path, dtype="float32", device="cpu"))
    asked = prompts(307, (3, 17))
    answers = engine.generate(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(asked, answers, strict=True))


def test_fp8_of_transformers_and_of_autofp8_differ_from_compressed_tensors_in_names_only(tmp_path: Path) -> None:
    for name, method, suffix in (
        ("fp8 block", {"weight_block_size": [32, 16], "activation_scheme": "dynamic"}, "weight_scale_inv"),
        ("fp8 tensor", {"activation_scheme": "static"}, "weight_scale"),
    ):
        make = made.compressed(name, torch.float32)

        def renamed(weight: Tensor, make: Any = make, suffix: str = suffix) -> made.Made:
            parts, dequantized = make(weight)
            return {"weight": parts["weight"], suffix: parts["weight_scale"]}, dequantized

        directory = tmp_path / suffix
        model = made.quantized(directory, renamed, {"quant_method": "fp8"} | method)
        weights = dict(model.named_parameters())
        assert all(torch.equal(weight, weights[name]) for name, weight in matrices(directory).items())


@pytest.mark.usefixtures("short_scales")
def test_parts_of_a_fused_matrix_with_another_order_each_stay_apart(tmp_path: Path) -> None:
    """Act-order may sort the inputs of q otherwise than those of k. The product is then one for each."""
    draw, orders = torch.Generator().manual_seed(3), list[Tensor]()

    def differently(inputs: int) -> Tensor:
        group_of = (torch.arange(inputs) // made.GROUP)[torch.randperm(inputs, generator=draw)]
        orders.append(group_of.argsort(stable=True))
        return group_of

    oracle = made.quantized(tmp_path, made.gptq(group_of=differently), made.gptq_config(), family="qwen2")
    names = [name.removesuffix(".weight") for name, _ in oracle.named_parameters() if made.is_quantized(name)]
    order_of = dict(zip(names, orders, strict=True))
    made.with_rows_in_8_bits(oracle, lambda name: made.GROUP * made.is_quantized(name), lambda name, _: order_of[name])
    model = Model.load(tmp_path, dtype="float32", device="cpu")
    layer = next(iter(weights_for_gpu(source_of(tmp_path, config_of(tmp_path)), config_of(tmp_path), CPU).layers))
    assert isinstance(layer["qkv_proj"], tuple)
    assert [len(part) for part in layer["qkv_proj"]] == [64, 32, 32]
    (prompt,) = prompts(307, (9,))
    (answer,) = static(model).generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert follows(oracle, prompt, answer.output_tokens)


def test_a_matrix_that_was_left_in_16_bits_stays_so_beside_quantized_ones(tmp_path: Path) -> None:
    make = made.compressed("int8")

    def some(weight: Tensor) -> made.Made:
        return ({"weight": weight.detach().clone()}, weight) if weight.shape[0] == 80 else make(weight)

    made.quantized(tmp_path, some, made.compressed_config("int8"))
    layer = next(iter(weights_for_gpu(source_of(tmp_path, config_of(tmp_path)), config_of(tmp_path), CPU).layers))
    assert isinstance(layer["gate_up_proj"], Tensor)
    assert isinstance(layer["down_proj"], QuantizedWeight)


# What is not supported, and what is damaged.


def config_with(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    weights |= {name: changes.pop(name) for name in list(changes) if name in weights}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return config | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | changes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes'; supported: compressed-tensors, fp8, gptq, awq",
        ),
        ([1], "quant_method is None; supported"),
        (
            config_with(format="nvfp4-pack-quantized"),
            "format is 'nvfp4-pack-quantized'; supported: int-quantized",
        ),
        (config_with(num_bits=3), "num_bits is 3; supported: 4, 8"),
        (config_with(type="float"), "type is 'float'; supported: int"),
        (config_with(strategy="tensor_group"), "strategy must be one of tensor, channel, group, block"),
        (config_with(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is 'sparse-24-bitmask'"),
        (config_with(config_groups={}), "num_bits is None; supported: 4, 8"),
        (config_with(config_groups=[1]), "quantization_config is not as compressed-tensors writes it"),
        (config_with(group_size=0), "group_size must be an integer from 2"),
        (made.gptq_config(bits=3), "bits is 3; supported: 4, 8"),
        (made.gptq_config(bits=4.0), "bits is 4.0; supported: 4, 8"),
        (made.gptq_config(checkpoint_format="marlin"), "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'"),
        (made.gptq_config(dynamic={"-:.*": {}}), "dynamic is .*; supported: none, {}"),
        (made.gptq_config(group_size=-2), "group_size must be an integer from 8"),
        (made.AWQ_CONFIG | {"version": "gemv"}, "version is 'gemv'; supported: gemm"),
        (made.AWQ_CONFIG | {"bits": 8}, "bits is 8; supported: 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a block must be two sizes, got .128."),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    ],
)
def test_variants_that_are_not_supported_are_named(config: Any, message: str, tmp_path: Path) -> None:
    bare = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    written = bare | {"model_type": "llama", "num_attention_heads": 4, "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {f"{Q}.qzeros": None}, rf"{Q}.qzeros does not fit: wanted I32 \[4, 12\], found nothing"),
        (
            "gptq",
            {f"{Q}.scales": torch.ones(0, 96)},
            r"scales does not fit: wanted .* \[4, 96\], found F32 \[0, 96\]",
        ),
        ("gptq", {f"{Q}.scales": torch.ones(96, 4)}, r"scales does not fit: wanted .* found F32 \[96, 4\]"),
        ("gptq", {f"{Q}.qweight": torch.zeros(0, 96, dtype=torch.int32)}, "is misshapen|does not fit"),
        ("gptq", {f"{Q}.qweight": torch.zeros(8, dtype=torch.int32)}, r"qweight \[8\] cannot be read"),
        (
            "gptq",
            {f"{Q}.qweight": torch.zeros(9, 96, dtype=torch.int32)},
            "72 inputs are no multiple of the group",
        ),
        (
            "gptq",
            {f"{Q}.g_idx": torch.full((64,), 1 << 30, dtype=torch.int32)},
            "q_proj.weight: its g_idx must put 16 inputs",
        ),
        (
            "gptq",
            {f"{Q}.g_idx": torch.full((64,), -1, dtype=torch.int32)},
            "q_proj.weight: its g_idx must put 16 inputs",
        ),
        ("awq", {f"{Q}.qweight": torch.zeros(64, 13, dtype=torch.int32)}, "q_proj.weight is misshapen|does not fit"),
        ("compressed int8", {f"{Q}.weight": None}, f"{Q}.weight is missing"),
        ("compressed int8", {f"{Q}.weight_scale": None}, f"{Q}.weight holds I8: readable are"),
        ("compressed int4", {f"{Q}.weight_packed": None}, f"{Q}.weight_packed is missing"),
        ("compressed int4 zeros", {f"{Q}.weight_zero_point": torch.zeros(1, 1)}, "weight_zero_point does not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    made.quantized(tmp_path, *FORMATS[name]())
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        [*weights_for_gpu(source_of(tmp_path, config_of(tmp_path)), config_of(tmp_path), CPU).layers]
