"""Families beyond the core's have the tokens and the logits of transformers, in the engine of each phase."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.extras.piecewise import record_pieces
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase6_integration.engine.assemble import assemble
from phase6_integration.engine.connect_engine import engine_options
from tests.phase2_prefill_decode.models import SIZES, saved, tiny_model
from tests.phase2_prefill_decode.ranks_in_threads import split
from tests.phase2_prefill_decode.test_identity import follows, logits, prompts

ANSWER = 24
HALF = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.0, 1.1, 1.3, 1.8, 2.0, 2.5]}
LONG |= {"long_factor": [1.0, 1.5, 2.0, 4.0, 5.0, 7.5], "partial_rotary_factor": 0.75}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 9, "layer_types": KINDS}),
    "gemma3-ropes": (
        "gemma3_text",
        {
            "head_dim": 16, "num_key_value_heads": 1, "sliding_window": 5, "layer_types": KINDS, "vocab_size": 300,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss", {"head_dim": 16, "sliding_window": 9, "num_local_experts": 8, "num_experts_per_tok": 3}
    ),
    "gpt-oss-limits": (
        "gpt_oss",
        {
            "head_dim": 24, "num_key_value_heads": 1, "layer_types": KINDS, "sliding_window": 5, "num_local_experts": 5,
            "num_experts_per_tok": 1, "swiglu_alpha": 1.1, "swiglu_limit": 0.6, "attention_bias": False,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 24,
                "truncate": False,
            },
        },
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "ministral3-window": ("ministral3", {"head_dim": 16, "sliding_window": 7, "num_key_value_heads": 1}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4, "sliding_window": 7, "num_key_value_heads": 1,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16
                },
            },
        },
    ),
    "phi3": ("phi3", {"intermediate_size": 128}),
    "phi3-partial": ("phi3", {"rope_parameters": HALF, "sliding_window": 9}),
    "phi3-long": (
        "phi3",
        {
            "rope_parameters": LONG, "original_max_position_embeddings": 16, "tie_word_embeddings": True,
            "intermediate_size": 128,
        },
    ),
    "phi3-short": (
        "phi3",
        {"rope_parameters": {**LONG, "factor": 4.0}, "original_max_position_embeddings": 256, "num_key_value_heads": 4},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-wide": ("smollm3", {"no_rope_layers": [1, 0, 1], "intermediate_size": 128}),  # whole blocks, on a CPU
    "smollm3-window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7, "tie_word_embeddings": False},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
        },
    ),
    "qwen2-moe-windows": (
        "qwen2_moe",
        {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 24, "mlp_only_layers": [0], "use_sliding_window": True,
            "sliding_window": 7, "num_hidden_layers": 4, "qkv_bias": False,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32}),
    "qwen3-moe-norm": (
        "qwen3_moe",
        {
            "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True,
            "mlp_only_layers": [1], "head_dim": 24, "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe-every-second": (
        "qwen3_moe",
        {
            "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "decoder_sparse_step": 2,
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 7,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 16, "num_experts_per_tok": 8}),
    "olmoe-norm": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 1},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7}),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_longrope_has_the_factors_of_the_longest_sequence_that_is_served(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers takes the short factors up to the original context, the long ones beyond it."""
    oracle = tiny_model("phi3", rope_parameters=LONG, original_max_position_embeddings=32)
    directory = saved(oracle, tmp_path)
    for context, lengths in ((32, (1, 9, 20)), (64, (33, 40, 45))):
        options = engine_options(model=str(directory), device="cpu", dtype="float32", max_model_len=context)
        given = prompts(oracle.config.vocab_size, lengths)
        with split(directory, ranks) if ranks > 1 else nullcontext() as loaded:
            parts = assemble(options, loaded)
            assert ("long factors of LongRoPE" in caplog.text) == (context > 32)
            engine = Engine(parts.model, parts.core)
            answers = engine.generate(given, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        for prompt, answer in zip(given, answers, strict=True):
            assert follows(oracle, prompt, answer.output_tokens)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_family_has_the_tokens_and_logits_of_transformers(name: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    oracle = tiny_model(family, **options)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    given = prompts(oracle.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    for prompt, answer in zip(given, static(model).generate(given, params), strict=True):
        assert len(answer.output_tokens) == ANSWER
        assert follows(oracle, prompt, answer.output_tokens)
    (prompt,) = prompts(oracle.config.vocab_size, [41])
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
        assert (logits(model, prompt) - wanted).abs().max() < 1e-4 * max(1, float(wanted.abs().max()))
        theirs_in_bf16 = oracle.to(torch.bfloat16)(torch.tensor([prompt])).logits[0].float()
        wanted = oracle.float()(torch.tensor([prompt])).logits[0]  # the same weights, without further rounding
    found = logits(Model.load(tmp_path, device="cpu", dtype="bfloat16"), prompt).float()
    assert (found - wanted).norm() < 1.5 * (theirs_in_bf16 - wanted).norm(), "within the noise of the family"


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_preemption_and_shared_prefixes_do_not_change_a_family_s_tokens(name: str, tmp_path: Path) -> None:
    """A pool that is too small for all requests, chunks of 7 tokens, and prompts that begin alike."""
    family, options = VARIANTS[name]
    oracle = tiny_model(family, seed=3, **options)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    (prefix, *rest) = prompts(oracle.config.vocab_size, (33, 2, 7, 18, 30))
    given = [prefix + end for end in rest]
    engine = continuous(model, TokenBudget(7), cache=PrefixCache(16, 8), ahead=1)
    answers = engine.generate(given, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
    for prompt, answer in zip(given, answers, strict=True):
        assert len(answer.output_tokens) == ANSWER
        assert follows(oracle, prompt, answer.output_tokens)


SPLIT = [name for name in VARIANTS if name.startswith(("gemma3", "granite", "ministral3", "phi3", "smollm3"))]


@pytest.mark.parametrize("name", SPLIT)
def test_a_family_has_the_same_tokens_over_two_ranks(name: str, tmp_path: Path) -> None:
    """Each rank has a part of q, of k and of v where a file has them as one matrix, and of gate and of up."""
    family, options = VARIANTS[name]
    oracle = tiny_model(family, seed=5, **options)
    directory = saved(oracle, tmp_path)
    given = prompts(oracle.config.vocab_size, (17, 41))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = static(Model.load(directory, device="cpu", dtype="float32")).generate(given, params)
    with split(directory, 2) as model:
        together = static(model).generate(given, params)
    assert [answer.output_tokens for answer in together] == [answer.output_tokens for answer in alone]
    assert all(follows(oracle, prompt, answer.output_tokens) for prompt, answer in zip(given, together, strict=True))


@pytest.mark.parametrize("name", ["olmo2", "olmo3"])
def test_a_family_whose_norms_are_over_all_heads_is_not_split(name: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    said = "tensor_parallel_size must be 1, because this model norms q and k across all heads"
    with pytest.raises(ConfigError, match=said), split(saved(tiny_model(family, **options), tmp_path), 2):
        pass


def test_recorded_pieces_of_a_family_with_other_layers_are_refused() -> None:
    options = {**SIZES, "model_type": "olmo2"}
    model = Model.random(ModelConfig.from_dict(options), device="cpu")
    runner = static(model).core.runner
    with pytest.raises(ConfigError, match="records layers like Llama's; those of olmo2 differ"):
        record_pieces(runner, (4,), 64, lambda compute: pytest.fail("nothing is recorded"))
