"""Experts: the grouped product, in every format, and what a checkpoint of experts may look like."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.backend import TORCH
from phase2_prefill_decode.connect import check_split, config_of, source_of
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.cpu.backend import packed_linear
from phase2_prefill_decode.extras.families.experts import PRODUCTS, RoutedExperts, grouped, grouped_reference
from phase2_prefill_decode.extras.families.layer import Experts
from phase2_prefill_decode.extras.families.stateful import has_states
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.extras.quantized.layout import SCHEMES, bytes_in
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.streams import weights_for_gpu
from phase2_prefill_decode.linear import TorchLinear
from phase2_prefill_decode.model import Model
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase2_prefill_decode.ranks_in_threads import split
from tests.phase2_prefill_decode.test_families import VARIANTS
from tests.phase2_prefill_decode.test_hybrids import VARIANTS as HYBRIDS
from tests.phase2_prefill_decode.test_hybrids import logits as logits_of_hybrid
from tests.phase2_prefill_decode.test_identity import follows, logits, prompts

CPU = torch.device("cpu")
COUNTS = 3, 0, 1, 130, 0, 20  # rows of each group: none, one, and more than an item has
ENDS = torch.tensor(COUNTS).cumsum(0).int()
HYBRIDS_WITH_EXPERTS = {"qwen3_5_moe_text": "qwen3.5-experts", "qwen3_next": "qwen3-next"}
FORMATS = "float32", "bfloat16", *SCHEMES


def matrices(format: str, outputs: int, inputs: int = 96) -> tuple[Any, Tensor]:
    """The matrices of all groups in one, and rows."""
    draw = torch.Generator().manual_seed(outputs)
    weight = torch.randn(len(COUNTS) * outputs, inputs, generator=draw)
    rows = torch.randn(sum(COUNTS), inputs, generator=draw)
    if format in SCHEMES:
        return quantize(weight, format), rows
    dtype = getattr(torch, format)
    return weight.to(dtype), rows.to(dtype)


@pytest.mark.parametrize("outputs", [40, 64, 100])
def test_each_row_is_multiplied_with_the_matrix_of_its_group(outputs: int) -> None:
    weight, rows = matrices("float32", outputs)
    whole = weight.unflatten(0, (len(COUNTS), -1))
    wanted = torch.cat([linear(own, matrix) for own, matrix in zip(torch.split(rows, [*COUNTS]), whole, strict=True)])
    for found in (grouped_reference(whole, rows, ENDS), grouped(packed_linear(weight), len(COUNTS), CPU)(rows, ENDS)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("outputs", [40, 64, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_a_group_s_rows_have_the_bits_of_a_product_with_its_matrix_alone(format: str, outputs: int) -> None:
    """And so does each row, whatever its neighbours are."""
    weight, rows = matrices(format, outputs)
    product = grouped(packed_linear(weight), len(COUNTS), CPU)
    found = product(rows, ENDS)
    for group, (start, end) in enumerate(pairwise([0, *ENDS.tolist()])):
        part = slice(group * outputs, (group + 1) * outputs)
        own = weight.part(part, slice(None)) if format in SCHEMES else weight[part]
        assert torch.equal(found[start:end], packed_linear(own)(rows[start:end]))
        if end > start:
            alone = product(rows[end - 1 : end], (end <= ENDS).int())
            assert torch.equal(alone, found[end - 1 : end])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("format", ["float32", *SCHEMES])
def test_the_kernel_of_a_gpu_has_the_products_of_the_reference(format: str) -> None:
    """Interpreted, with groups of one tile, of several, and of none."""
    from phase2_prefill_decode.extras.quantized.triton_grouped import TritonGroups
    from phase2_prefill_decode.extras.quantized.triton_product import TritonProduct

    weight, rows = matrices(format, 72)
    plain = weight if isinstance(weight, Tensor) else weight.dequantize().to(rows.dtype)
    product = TorchLinear(weight) if isinstance(weight, Tensor) else TritonProduct(weight)
    found = TritonGroups(product, len(COUNTS))(rows, ENDS)
    wanted = grouped_reference(plain.view(len(COUNTS), 72, -1), rows, ENDS)
    assert (found - wanted).float().norm() < 5e-3 * wanted.float().norm()


@pytest.mark.parametrize("norm_topk", [False, True])
def test_a_token_s_result_does_not_depend_on_its_neighbours(norm_topk: bool) -> None:
    """Bit for bit, on a CPU; and it is that of the reference, up to rounding."""
    draw = torch.Generator().manual_seed(1)
    experts = Experts(number=12, top_k=3, inner=40, norm_topk=norm_topk)
    weights = {
        name: torch.randn(sum(tensor.modules.values()), tensor.inputs, generator=draw) / tensor.inputs**0.5
        for name, tensor in experts.tensors(64).items()
    }
    from phase2_prefill_decode.extras.cpu.backend import CPU as FAST

    fast, plain = (RoutedExperts(experts, weights, backend) for backend in (FAST, TORCH))
    x = torch.randn(50, 64, generator=draw)
    together = fast(x)
    torch.testing.assert_close(together, plain(x), rtol=1e-4, atol=1e-5)
    for token in range(0, 50, 7):
        assert torch.equal(fast(x[token : token + 1])[0], together[token])
        assert torch.equal(fast(x[token : token + 9]), together[token : token + 9])
    assert fast(x[:0]).shape == (0, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("kernel", ["reference", "triton"])
def test_a_recorded_step_routes_the_tokens_of_its_replay(kernel: str) -> None:
    """As strict as a CUDA graph: the host reads nothing, so tokens that choose other experts are right, too."""
    from tests.gpu.captured import Recorder

    draw = torch.Generator().manual_seed(2)
    experts = Experts(number=6, top_k=2, inner=32, norm_topk=True)
    weights = {
        name: torch.randn(sum(tensor.modules.values()), tensor.inputs, generator=draw) / tensor.inputs**0.5
        for name, tensor in experts.tensors(32).items()
    }
    layer = RoutedExperts(experts, weights, TORCH)
    if kernel == "triton":
        from phase2_prefill_decode.extras.quantized.triton_grouped import TritonGroups

        layer._gate_up, layer._down = (TritonGroups(TorchLinear(weights[name]), 6) for name in PRODUCTS)
    x, result = torch.zeros(3, 32), torch.zeros(3, 32)
    with torch.inference_mode():
        replay = Recorder()(lambda: result.copy_(layer(x)))
        for _ in range(3):
            x.copy_(torch.randn(3, 32, generator=draw))
            replay()
            other = RoutedExperts(experts, weights, TORCH)
            torch.testing.assert_close(result, other(x), rtol=1e-4, atol=1e-5)
            assert torch.equal(layer.ends, other.ends), "a record of the engine's steps reads them"


@pytest.mark.parametrize("name", ["qwen3-moe-norm", "qwen2-moe", "olmoe", "mixtral"])
def test_experts_that_are_saved_in_one_tensor_are_read_as_those_apart(name: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    oracle = tiny_model(family, **options)
    apart = Model.load(saved(oracle, tmp_path / "apart"), device="cpu", dtype="float32")
    fused = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    oracle.config.save_pretrained(tmp_path / "fused")
    if oracle.config.tie_word_embeddings:
        del fused["lm_head.weight"]
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    together = Model.load(tmp_path / "fused", device="cpu", dtype="float32")
    (prompt,) = prompts(oracle.config.vocab_size, [9])
    assert torch.equal(logits(together, prompt), logits(apart, prompt))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_experts_are_quantized_at_load_and_their_router_is_not(family: str, scheme: str, tmp_path: Path) -> None:
    """The answer is that of transformers with the rounded weights, up to what a CPU's rows in 8 bits add."""
    shared = {"shared_expert_intermediate_size": 64} if family == "qwen2_moe" else {}
    oracle: Any = tiny_model(family, hidden_size=256, head_dim=64, num_experts=8, num_experts_per_tok=2,
                        moe_intermediate_size=64, dtype=torch.bfloat16, **shared)  # fmt: skip
    directory = saved(oracle, tmp_path)
    plain = Model.load(directory, device="cpu", dtype="float32")
    model = Model.load(directory, device="cpu", dtype="float32", transform=Quantization(scheme))
    router, gate_up, down, *others = model.decoder.layers[0].mlp.down_proj.linears  # type: ignore[attr-defined]
    assert {router.dtype, *(gate.dtype for gate in others[2:])} == {torch.float32}
    assert {gate_up.dtype, down.dtype} != {torch.float32}
    with torch.no_grad():
        for name, weight in oracle.float().named_parameters():
            if name.endswith("_proj.weight") or ".experts." in name:
                rounded = quantize(weight.flatten(0, -2).bfloat16().float(), scheme).dequantize()
                weight.copy_(rounded.view(weight.shape))
    (prompt,) = prompts(307, [1])
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
    found, before = logits(model, prompt), logits(plain, prompt)
    assert (found - wanted).norm() < 0.5 * (before - wanted).norm() + 0.02 * wanted.norm()
    matrices = 3 * sum(
        tensor.numel()
        for name, tensor in oracle.named_parameters()
        if "layers.0" in name and "_proj" in name and not name.endswith("bias")
    )
    config = config_of(directory)
    assert config.parameters == sum(tensor.numel() for tensor in oracle.parameters())
    assert bytes_in(config, scheme) == config.bytes - int(matrices * (2 - SCHEMES[scheme]))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: made.compressed("fp8 block"), lambda: made.compressed_config("fp8 block")),
        (lambda: made.compressed("int8"), lambda: made.compressed_config("int8")),
        (made.gptq, made.gptq_config),
        (lambda: made.awq, lambda: made.AWQ_CONFIG),
    ],
    ids=["fp8", "int8", "gptq", "awq"],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next"])
def test_a_quantized_checkpoint_has_a_matrix_for_each_expert(
    make: Any, config: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    options = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64}  # rounding cannot choose others
    options |= {"shared_expert_intermediate_size": 64} if family != "qwen3_moe" else {}
    if family in HYBRIDS_WITH_EXPERTS:
        options |= HYBRIDS[HYBRIDS_WITH_EXPERTS[family]][1] | options
        large = "_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"
        monkeypatch.setattr(made, "is_quantized", lambda name: name.endswith(large))
    oracle = made.quantized(tmp_path, make(), config(), family=family, intermediate_size=64, **options)
    read = config_of(tmp_path, "float32")
    source, plain = source_of(tmp_path, read), source_of(saved(oracle, tmp_path / "plain"), read)
    for name in plain.stored:
        parts = [part if isinstance(part, Tensor) else part.dequantize() for part in source.chunks(name)]
        torch.testing.assert_close(torch.cat(parts).float(), torch.cat([*plain.chunks(name)]).float(), rtol=0, atol=0)
    if family == "qwen3_next":  # rows rounded to 8 bits change more there
        return
    (layer, *_) = weights_for_gpu(source, read, CPU).layers
    for field in ("gate_up_proj", "down_proj"):
        wanted = oracle.get_parameter(f"model.layers.0.mlp.experts.{field}").flatten(0, 1)
        torch.testing.assert_close(layer[field].dequantize().float(), wanted.float(), rtol=0, atol=0)
    (prompt,) = prompts(307, [1])
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
    model = Model.load(tmp_path, device="cpu", dtype="float32")
    found = logits_of_hybrid(model, prompt, [1]) if has_states(read) else logits(model, prompt)
    assert (found - wanted).norm() < 0.05 * wanted.norm(), "rows are rounded to 8 bits"


def test_experts_whose_inputs_have_other_orders_are_refused(tmp_path: Path) -> None:
    """As GPTQ with act-order has them: a group's inputs are from anywhere, and each expert's from elsewhere."""
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    shuffled = made.gptq(group_of=lambda inputs: (torch.arange(inputs) // made.GROUP)[torch.randperm(inputs)])
    made.quantized(tmp_path, shuffled, made.gptq_config(), family="qwen3_moe", intermediate_size=64, **options)
    with pytest.raises(ConfigError, match="experts of one matrix must have one format, with one order of their inputs"):
        Model.load(tmp_path, device="cpu", dtype="float32")


def test_ranks_have_a_part_of_each_expert(tmp_path: Path) -> None:
    for name in ("qwen3-moe-norm", "qwen2-moe", "mixtral", "gpt-oss"):
        family, options = VARIANTS[name]
        oracle = tiny_model(family, **options)
        given = prompts(oracle.config.vocab_size, (3, 17))
        with split(saved(oracle, tmp_path / name), 2) as model:
            answers = static(model).generate(given, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        for prompt, answer in zip(given, answers, strict=True):
            assert follows(oracle, prompt, answer.output_tokens)


def test_what_cannot_be_split_over_ranks_says_why(tmp_path: Path) -> None:
    family, options = VARIANTS["olmoe"]
    config = config_of(saved(tiny_model(family, **options), tmp_path / "olmoe"))
    with pytest.raises(
        ConfigError, match="tensor_parallel_size must be 1, because this model norms q and k across all"
    ):
        check_split(config, 2)
    family, options = VARIANTS["qwen3-moe"]
    config = config_of(saved(tiny_model(family, **options | {"moe_intermediate_size": 33}), tmp_path / "qwen"))
    with pytest.raises(ConfigError, match="must divide the model's moe_intermediate_size, 33; got 2"):
        check_split(config, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 17}, "num_experts_per_tok must be an integer from 1 to 16, got 17"),
        ({"num_local_experts": 0}, "num_experts must be an integer from 1"),
        ({"num_experts": 4}, "two names of one number"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of numbers of layers, got 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer from 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_a_configuration_that_makes_no_experts_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    family, options = VARIANTS["qwen3-moe"]
    tiny_model(family, **options).config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path)
