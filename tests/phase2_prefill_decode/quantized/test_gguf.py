"""GGUF files as models. The oracles are llama.cpp's package, which writes and dequantizes them, and transformers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phase0_request.extras.gguf_file import GGUFHeader, GGUFTensor, read_header
from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.connect import config_of, source_of
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.families.stateful import has_states
from phase2_prefill_decode.extras.gguf import gguf_config
from phase2_prefill_decode.extras.gguf.gguf import GGUFCheckpoint
from phase2_prefill_decode.extras.quantized.ggml import BLOCKS
from phase2_prefill_decode.extras.streams import weights_for_gpu
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model
from tests import gguf_files
from tests.gguf_files import KindOf, saved_gguf
from tests.phase2_prefill_decode.models import ROPES, saved, tiny_model
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase2_prefill_decode.test_families import HALF, LONG
from tests.phase2_prefill_decode.test_families import VARIANTS as FAMILIES
from tests.phase2_prefill_decode.test_hybrids import VARIANTS as HYBRIDS
from tests.phase2_prefill_decode.test_hybrids import logits as logits_of_hybrid
from tests.phase2_prefill_decode.test_identity import follows, logits, prompts

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_dequantized_as_by_the_package(kind: int) -> None:
    torch.manual_seed(kind)
    block = BLOCKS[kind]
    assert gguf_files.number(block.name) == kind
    blocks = gguf_files.encoded((torch.randn(6, 768) / 20).numpy(), block.name)
    weight = block.read(torch.from_numpy(blocks.copy()).view(6, -1, block.bytes))
    assert tuple(weight.shape) == (6, 768)
    assert torch.equal(weight.dequantize(), gguf_files.dequantized(blocks, block.name))


def mixed(many: str, few: str, *wide: str) -> KindOf:
    """More bits for the matrices with one of these words in their names, as llama.cpp's quantizer chooses."""
    return lambda name: many if any(word in name for word in (*wide, "embed")) else few


Q4_K_M = mixed("Q6_K", "Q4_K", "v_proj", "down_proj")  # so q, k and v are not of one format


MULTIPLIERS = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2
}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
GEMMA3: dict[str, Any] = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7, "num_hidden_layers": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    },
}  # fmt: skip
LFM2 = HYBRIDS["lfm2"][1] | {"intermediate_size": 96, "block_auto_adjust_ff_dim": False}
QWEN3_5 = HYBRIDS["qwen3.5"][1] | {"intermediate_size": 96}
WIDE_QWEN3_5 = QWEN3_5 | WIDE | {"linear_value_head_dim": 64, "num_hidden_layers": 4}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {  # the last word is the type of the matrices
    "gemma3 F16": ("gemma3_text", GEMMA3),
    "gemma3 Q8_0": ("gemma3_text", GEMMA3 | {"intermediate_size": 96}),
    "ministral3 F16": FAMILIES["ministral3"],
    "ministral3 Q8_0": ("ministral3", FAMILIES["ministral3"][1] | {"intermediate_size": 96}),
    "olmo3 F16": FAMILIES["olmo3"],
    "lfm2 F16": ("lfm2", LFM2),
    "lfm2 Q8_0": ("lfm2", LFM2),
    "qwen3.5 F16": ("qwen3_5_text", QWEN3_5),
    "qwen3.5 Q8_0": ("qwen3_5_text", QWEN3_5 | {"linear_value_head_dim": 32}),  # whole blocks change their places
    "qwen3.5 of one order F16": ("qwen3_5_text", QWEN3_5 | {"linear_num_key_heads": 4}),
}
CASES: dict[str, tuple[str, KindOf, dict[str, Any]]] = {
    "llama Q8_0": ("llama", lambda name: "Q8_0", {"intermediate_size": 96}),
    "llama tied Q4_0": ("llama", mixed("Q6_K", "Q4_0"), WIDE | {"tie_word_embeddings": True}),
    "llama biases F16": ("llama", lambda name: "F16", {"attention_bias": True}),
    "mistral F32": ("mistral", lambda name: "F32", {}),
    "qwen2 Q4_K_M of narrow rows": ("qwen2", mixed("Q8_0", "Q5_0", "v_proj"), {"intermediate_size": 96}),
    "qwen3 BF16": ("qwen3", lambda name: "BF16", {}),
    "qwen3 Q4_K_M": ("qwen3", Q4_K_M, WIDE),
    "llama Q4_K_M": ("llama", Q4_K_M, WIDE | {"tie_word_embeddings": True}),
    "granite F16": ("granite", lambda name: "F16", MULTIPLIERS | {"tie_word_embeddings": True}),
    "granite biases Q8_0": ("granite", lambda name: "Q8_0", MULTIPLIERS | BIASES | {"intermediate_size": 96}),
    "olmo2 F16": ("olmo2", lambda name: "F16", {}),
    "olmo2 Q8_0": ("olmo2", lambda name: "Q8_0", {"num_key_value_heads": 1, "intermediate_size": 96}),
    "smollm3 F16": ("smollm3", lambda name: "F16", {"num_hidden_layers": 5}),  # the fourth does not rotate
    "smollm3 Q8_0": ("smollm3", lambda name: "Q8_0", {"num_hidden_layers": 4, "intermediate_size": 96}),
    "phi3 F16": ("phi3", lambda name: "F16", {}),
    "phi3 window Q8_0": ("phi3", lambda name: "Q8_0", {"sliding_window": 9, "intermediate_size": 96}),
    "phi3 half Q8_0": ("phi3", lambda name: "Q8_0", {"rope_parameters": HALF, "intermediate_size": 96}),
    "phi3 long F16": ("phi3", lambda name: "F16", {"rope_parameters": LONG, "original_max_position_embeddings": 4}),
    "qwen3.5 Q4_K_M": ("qwen3_5_text", mixed("Q6_K", "Q4_K", "in_proj_z", "v_proj", "down_proj"), WIDE_QWEN3_5),
    **{name: (family, mixed(*[name.split()[-1]] * 2), options) for name, (family, options) in FURTHER.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_answers_as_transformers_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    family, kind_of, options = CASES[name]
    file = tmp_path / "model.gguf"
    oracle = saved_gguf(tiny_model(family, **options), file, kind_of)
    made.with_rows_in_8_bits(oracle, lambda name: 16 if kind_of(name) == "Q6_K" else 32 * kind_of(name).startswith("Q"))
    engine = static(Model.load(file, dtype="float32", device="cpu"))
    asked = prompts(307, (3, 17))
    answers = engine.generate(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(asked, answers, strict=True))


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_attention_heads": 4,
        "hidden_size": 256,
    },
    "qwen3_5_moe_text": {
        **{name: size for name, size in WIDE_QWEN3_5.items() if name != "intermediate_size"},
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_as_the_package_reads_them(family: str, tmp_path: Path) -> None:
    """In 16 bits, the tokens of transformers; in a mixture of 4 and 6, its weights bit for bit."""
    options = {name: size for name, size in WIDE.items() if name != "head_dim" or family != "olmoe"} | EXPERTS[family]
    oracle = saved_gguf(tiny_model(family, **options), tmp_path / "plain.gguf", lambda name: "F16")
    engine = static(Model.load(tmp_path / "plain.gguf", dtype="float32", device="cpu"))
    asked = prompts(307, (3, 17))
    answers = engine.generate(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(asked, answers, strict=True))

    oracle = saved_gguf(tiny_model(family, **options), tmp_path / "model.gguf", Q4_K_M)
    config = config_of(tmp_path / "model.gguf")
    (layer, *_) = weights_for_gpu(source_of(tmp_path / "model.gguf", config), config, torch.device("cpu")).layers
    assert config.dtype == "bfloat16"
    for field in ("gate_up_proj", "down_proj"):
        wanted = oracle.get_parameter(f"model.layers.0.mlp.experts.{field}").flatten(0, 1)
        assert torch.equal(layer[field].dequantize(), wanted)
    model = Model.load(tmp_path / "model.gguf", dtype="float32", device="cpu")
    (prompt,) = prompts(307, (1,))
    wanted = oracle(torch.tensor([prompt])).logits[0]
    found = logits_of_hybrid(model, prompt, [1]) if has_states(config) else logits(model, prompt)
    assert (found - wanted).norm() < 0.05 * wanted.norm(), "rows are rounded to 8 bits"


@pytest.mark.parametrize("rope", ROPES)
def test_the_config_is_that_of_the_model(rope: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = ROPES[rope]
    if rope == "llama3":
        parameters = parameters | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
    model = tiny_model("llama", rope_parameters=dict(parameters), head_dim=64)
    out = gguf_files.writer(tmp_path / "model.gguf", model.config)
    if rope == "llama3":
        plain = 1 / 500_000.0 ** (torch.arange(0, 64, 2) / 64)
        out.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    elif rope != "default":
        out.add_string("llama.rope.scaling.type", rope)
        out.add_rope_scaling_factor(parameters["factor"])
        out.add_rope_scaling_orig_ctx_len(parameters.get("original_max_position_embeddings", 0))
    for name, weight in model.named_parameters():
        out.add_tensor(gguf_files.gguf_name(name), weight.detach().float().numpy())
    gguf_files.close(out)
    wanted = ModelConfig.from_pretrained(saved(model, tmp_path))
    wanted = replace(wanted, rms_norm_eps=float(torch.tensor(wanted.rms_norm_eps)))  # the file has it in float32
    assert config_of(tmp_path / "model.gguf") == wanted


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Model.load(file, device="cpu")
    return str(caught.value)


def test_types_that_are_not_supported_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    out = gguf_files.writer(tmp_path / "model.gguf", model.config)
    for name, weight in model.named_parameters():
        blocks = torch.zeros(len(weight), 84, dtype=torch.uint8).numpy()  # for 256 numbers of a row
        content, kind = (blocks, "Q2_K") if weight.ndim > 1 else (weight.detach().numpy(), "F32")
        out.add_tensor(gguf_files.gguf_name(name), content, raw_dtype=gguf_files.number(kind))
    gguf_files.close(out)
    assert (
        "token_embd.weight [307, 256] is of type Q2_K: readable are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K"
        in (refusal(tmp_path / "model.gguf"))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.add_expert_shared_count(1), "llama.expert_shared_count is 1; supported is 0"),
        (lambda out: out.add_uint32("llama.expert_gating_func", 2), "llama.expert_gating_func is 2; supported is 1"),
        (lambda out: out.add_sliding_window(64), "llama.attention.sliding_window is not supported"),
        (lambda out: out.add_string("llama.rope.scaling.type", "longrope"), "rope_type must be one of .*'longrope'"),
        (lambda out: out.add_float32("llama.rope.scaling.attn_factor", 2.0), "attn_factor is 2.0; supported is 1.0"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    out = gguf_files.writer(tmp_path / "model.gguf", model.config)
    change(out)
    for name, weight in model.named_parameters():
        out.add_tensor(gguf_files.gguf_name(name), weight.detach().numpy())
    gguf_files.close(out)
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "model.gguf")


def test_a_file_that_was_not_copied_whole_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    saved_gguf(tiny_model("llama"), file, lambda name: "F16")
    last = max(tensor.start for tensor in read_header(file).tensors.values())
    file.write_bytes(file.read_bytes()[: last + 10])
    assert "reaches beyond the end of the file, which was not copied whole" in refusal(file)


def test_layers_that_draft_tokens_are_not_loaded(tmp_path: Path) -> None:
    """The converter appends them to the others, and counts them."""
    saved_gguf(tiny_model("qwen3_5_text", **QWEN3_5), tmp_path / "model.gguf", lambda name: "F16")
    header = read_header(tmp_path / "model.gguf")
    more = {
        "blk.5.attn_norm.weight": GGUFTensor(0, (64,), 0),
        "blk.5.nextn.eh_proj.weight": GGUFTensor(1, (64, 128), 0),
    }
    count = {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 1}
    drafting = replace(header, metadata=header.metadata | count, tensors=header.tensors | more)
    assert gguf_config.config_of(drafting) == gguf_config.config_of(header)
    assert GGUFCheckpoint(drafting).stored == GGUFCheckpoint(header).stored


HOSTILE: list[tuple[dict[str, Any], dict[str, GGUFTensor], str]] = [
    ({}, {"token_embd.weight": GGUFTensor(0, (), 0)}, "must hold a matrix token_embd.weight"),
    ({"embedding_length": 64.0}, {}, "embedding_length must be an integer"),
    ({"attention.key_length": 1 << 62}, {}, "key_length must be an integer"),
    ({"attention.head_count": -4}, {}, "head_count must be an integer"),
    ({"context_length": [1]}, {}, "must hold llama.context_length"),
    ({"rope.freq_base": 0}, {}, "freq_base must be a number above 0"),
    ({"rope.freq_base": -5.5}, {}, "freq_base must be a number above 0"),
    ({"attention.sliding_window": math.nan}, {}, "sliding_window must be an integer"),
    ({"attention.head_count_kv": [4, 2]}, {}, r"head_count_kv must be one number, got \[2, 4\]"),
    ({"attention.head_count_kv": ["4"]}, {}, "head_count_kv must be integers from 0"),
    ({"nextn_predict_layers": 0.5}, {}, "nextn_predict_layers must be an integer"),
    ({}, {"rope_freqs.weight": GGUFTensor(0, (8,), 0)}, "rope_freqs.weight must be a number above 0, got 0.0"),
    ({}, {"rope_freqs.weight": GGUFTensor(0, (8,), 90)}, "must hold 8 numbers in float32"),
]


@pytest.mark.parametrize(("metadata", "tensors", "message"), HOSTILE)
def test_metadata_that_no_model_has_is_refused(
    metadata: dict[str, Any], tensors: dict[str, GGUFTensor], message: str, tmp_path: Path
) -> None:
    """Fault: several of these were a division by zero, or a TypeError, with a traceback."""
    (tmp_path / "model.gguf").write_bytes(bytes(100))
    sound = {"attention.head_count": 4, "embedding_length": 64, "context_length": 128, "feed_forward_length": 64}
    sound |= {"block_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}  # type: ignore[dict-item]
    given = {"general.architecture": "llama"} | {f"llama.{name}": value for name, value in (sound | metadata).items()}
    stored = {"token_embd.weight": GGUFTensor(0, (8, 64), 0)} | tensors
    with pytest.raises(ValueError, match=message):
        gguf_config.config_of(GGUFHeader(tmp_path / "model.gguf", given, stored))
