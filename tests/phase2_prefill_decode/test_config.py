"""A config.json means what it means to transformers: its configurations and models are the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from phase0_request.support.checks import ConfigError
from phase1_kv_pool.lab.model_layout import layout_of
from phase1_kv_pool.layout import KVLayout
from phase2_prefill_decode.loading.config import ModelConfig, RopeParameters
from tests.phase2_prefill_decode.models import FAMILIES, SIZES, VARIANTS, saved, tiny_model, variant
from tests.phase2_prefill_decode.tiny import windowed

FOUR: dict[str, Any] = {"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
OPTIONAL = "num_key_value_heads", "max_position_embeddings", "eos_token_id"
BARE = {name: value for name, value in SIZES.items() if name not in OPTIONAL}  # the required fields


def windows_of(model: Any) -> tuple[int | None, ...]:
    """The window of each layer of a model."""
    of_all = model.config.sliding_window if model.config.model_type == "mistral" else None
    return tuple(getattr(layer.self_attn, "sliding_window", of_all) for layer in model.model.layers)


def counted(config: Any) -> int:
    """The parameters of transformers' model, made without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_read_as_transformers_wrote_it(name: str, tmp_path: Path) -> None:
    model = variant(name)
    config, theirs = ModelConfig.from_pretrained(saved(model, tmp_path)), model.config
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert config.model_type == theirs.model_type
    assert (config.vocab_size, config.num_hidden_layers) == (theirs.vocab_size, theirs.num_hidden_layers)
    assert (config.num_attention_heads, config.num_key_value_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (config.hidden_size, config.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert config.head_dim == attention.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.qkv_bias == (attention.q_proj.bias is not None) == (attention.v_proj.bias is not None)
    assert config.out_bias == (attention.o_proj.bias is not None)
    assert config.mlp_bias == (mlp.gate_proj.bias is not None) == (mlp.down_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.tie_word_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert config.windows == windows_of(model)
    assert config.rope_parameters.rope_type == theirs.rope_parameters["rope_type"]
    assert config.rope_parameters.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.dtype == "float32"
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert config.kv_layout(8) == layout_of(tmp_path, 8, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_transformers_defaults(family: str) -> None:
    sizes = BARE | {"num_attention_heads": 32, "hidden_size": 512}
    theirs = AutoConfig.for_model(family, **sizes)
    config = ModelConfig.from_dict({"model_type": family, **sizes})
    eos = theirs.eos_token_id
    assert config.num_key_value_heads == theirs.num_key_value_heads
    assert config.head_dim == getattr(theirs, "head_dim", 512 // 32)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rope_parameters == RopeParameters(rope_theta=theirs.rope_parameters["rope_theta"])
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.eos_token_id == (() if eos is None else (eos,))
    assert config.windows[0] == (theirs.sliding_window if family == "mistral" else None)
    assert config.parameters == counted(theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_fields_are_derived_or_none(family: str) -> None:
    nulls = dict.fromkeys(["num_key_value_heads", "rope_scaling", "sliding_window", "eos_token_id", "layer_types"])
    head_dim = {} if family == "qwen3" else {"head_dim": None}  # which transformers refuses there
    config = ModelConfig.from_dict({"model_type": family, **BARE, **nulls, **head_dim})
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == (128 if family == "qwen3" else 16)
    assert config.windows == (None, None, None)
    assert config.eos_token_id == ()
    assert config.rope_parameters == RopeParameters()


# As their makers published them, cut to what counts. The parameters are those their model cards or files state.
PUBLISHED: dict[int, dict[str, Any]] = {
    8_030_261_248: {  # Llama 3.1 8B
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "eos_token_id": [128_001, 128_008, 128_009], "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
    },
    7_241_732_096: {  # Mistral 7B
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
    494_032_768: {  # Qwen2.5 0.5B
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32_768, "max_window_layers": 24, "sliding_window": 32_768, "rope_theta": 1_000_000.0,
        "use_sliding_window": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 151_645,
    },
    596_049_920: {  # Qwen3 0.6B
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40_960, "max_window_layers": 28, "rope_scaling": None,
        "rope_theta": 1_000_000, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "eos_token_id": 151_645, "hidden_act": "silu",
    },
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("parameters", PUBLISHED)
def test_well_known_models_have_their_published_number_of_parameters(parameters: int) -> None:
    config = ModelConfig.from_dict(PUBLISHED[parameters])
    assert config.parameters == parameters
    assert config.bytes == 2 * parameters
    assert config.rope_parameters.rope_theta == PUBLISHED[parameters]["rope_theta"]


@given(
    st.sampled_from(["qwen2", "qwen3"]),
    st.booleans(),
    st.none() | st.integers(1, 99),
    st.integers(0, 8),
    st.none() | st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_qwens_windows_are_where_transformers_puts_them(
    family: str, used: bool, window: int | None, first: int, sliding: list[bool] | None
) -> None:
    kinds = None if sliding is None else ["sliding_attention" if one else "full_attention" for one in sliding]
    written = BARE | {"num_hidden_layers": 6, "num_key_value_heads": 2, "use_sliding_window": used}
    written |= {"sliding_window": window, "max_window_layers": first, "layer_types": kinds}
    theirs = AutoConfig.for_model(family, **written)
    wanted = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    if theirs.sliding_window is None and "sliding_attention" in theirs.layer_types:  # there is no window to slide
        with pytest.raises(ConfigError, match="layer_types must be full_attention for each of 6 layers, got"):
            ModelConfig.from_dict({"model_type": family, **written})
    else:
        assert ModelConfig.from_dict({"model_type": family, **written}).windows == wanted


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_first_layers_have_no_window_if_the_file_does_not_name_them(family: str) -> None:
    written = BARE | {"num_hidden_layers": 30, "num_key_value_heads": 2, "use_sliding_window": True}
    theirs = AutoConfig.for_model(family, **written)
    assert theirs.layer_types == ["full_attention"] * 28 + ["sliding_attention"] * 2
    assert ModelConfig.from_dict({"model_type": family, **written}).windows == (None,) * 28 + (4096,) * 2


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ([3, 9], 9, (3, 9)),
        ([3, 9], [7, 3], (3, 9, 7)),
        ([3, 9], None, (3, 9)),
        ([3, 9], "no file", (3, 9)),
        ("default", "no file", (2,)),
        ("default", None, (2,)),
        ("default", 11, (11,)),
    ],
)
def test_eos_ids_are_those_of_both_files_and_else_the_default(
    config: Any, generation: Any, ends: tuple[int, ...], tmp_path: Path
) -> None:
    own = {} if config == "default" else {"eos_token_id": config}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **BARE, **own}))
    if generation != "no file":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_id == ends


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_dtype_is_read_by_both_of_its_names(written: dict[str, str], dtype: str) -> None:
    assert ModelConfig.from_dict({"model_type": "llama", **BARE, **written}).dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, .*, got 'gpt2'"),
        ({"model_type": None}, "model_type must be one of llama, mistral, qwen2, qwen3, .*, got None"),
        ({"hidden_size": None, "vocab_size": None}, "configuration lacks vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu' or 'swish'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported is 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"is_causal": False}, "is_causal is False; supported is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "default, linear, llama3, yarn, got 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope must be one set of parameters"),
        ({"rope_parameters": [1]}, "rope must be one set of parameters for all layers, got"),
        ({"head_dim": 12}, "head_dim must be a multiple of 8 from 8 to 256, got 12"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 from 8 to 256, got 264"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of its 4 heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            "layer_types must be full_attention for each of 3",
        ),
        ({"eos_token_id": 307}, "eos_token_id must be an integer from 0 to 306, got 307"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be an integer from 0 to .*, got '</s>'"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16, got 'float8_e4m3fn'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to .*, got 0"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings must be an integer from 1 to .*, got 'long'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number from 0, got -1"),
    ],
)
def test_unsupported_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"model_type": "llama", **BARE, **change})


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 7)])
def test_layer_types_count_only_where_transformers_reads_them(family: str, window: int | None) -> None:
    written = {**BARE, "num_key_value_heads": 2, "sliding_window": 7}
    written["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    assert ModelConfig.from_dict({"model_type": family, **written}).windows == (window,) * 3
    assert windows_of(tiny_model(family, **written)) == (window,) * 3


def test_four_sizes_make_a_config() -> None:
    config = ModelConfig(**FOUR)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (4, 16, 192)
    assert config.windows == (None, None)
    assert config.rope_parameters == RopeParameters(rope_type="default", rope_theta=10_000)
    assert not any((config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings))
    assert config.kv_layout() == KVLayout(2, 4, 16, 16, "bfloat16")
    assert config.kv_layout(64, "float32") == KVLayout(2, 4, 16, 64, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .*, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1 to .*, got True"),
        ({"num_attention_heads": 2.0}, "num_attention_heads must be an integer from 1 to .*, got 2.0"),
        ({"hidden_size": -64}, "hidden_size must be an integer from 1 to .*, got -64"),
        ({"num_key_value_heads": 8}, "num_attention_heads must be a multiple of num_key_value_heads, got 4 and 8"),
        ({"intermediate_size": -1}, "intermediate_size must be an integer from 0 to .*, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number from 0, got nan"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer from 1 to .*, got 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"layers": windowed(7)}, "layers must describe each of 2 layers, got 1"),
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, .*, got 'gpt2'"),
    ],
)
def test_bad_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(FOUR | change))
