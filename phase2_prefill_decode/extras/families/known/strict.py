"""Refuses fields of a config.json that are not known, where they could change what a model computes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from phase0_request.support.checks import ConfigError, check_int
from phase2_prefill_decode.loading.config import MAX_DIMENSION, ROPE_TYPES
from phase2_prefill_decode.loading.families import Family, fields_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ = _names(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rms_norm_eps attention_bias mlp_bias tie_word_embeddings rope_parameters
    rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings eos_token_id dtype
    torch_dtype use_sliding_window model_type layer_types hidden_act is_causal add_cross_attention
    """
)  # by `fields_of`
HARMLESS = _names(
    """
    architectures attn_implementation auto_map bad_words_ids base_model_tp_plan begin_suppress_tokens
    cache_implementation chunk_size_feed_forward diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task full_attn_mod
    gradient_checkpointing id2label initializer_cutoff_factor initializer_range interpolate_factor
    is_llama_config is_encoder_decoder label2id length_penalty max_length min_length model_max_length
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores prefix pretraining_tp problem_type pruned_heads
    quantization_config repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise rope_interleaved suppress_tokens task_specific_params temperature tokenizer_class top_k
    top_p torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_cache
    """
)  # training, generation and bookkeeping
ENDINGS = "_token_id", "_token_ids", "_token_index", "dropout", "_pdrop", "_drop"
ROPE = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"}.union(*ROPE_TYPES.values()) - {"factors"})
QWEN3_5 = "qwen3_5_text", "qwen3_5_moe_text"
ROPE_OF = {  # what only this family reads
    "ministral3": {"llama_4_scaling_beta", "max_position_embeddings"},
    **{kind: {"mrope_section", "mrope_interleaved"} for kind in QWEN3_5},  # a token of a text has one position
    "phi3": {"short_factor", "long_factor"},
}
# Fields of other architectures: with one of them, a model is not the Llama, Mistral or Qwen that its file says it is.
ELSEWHERE = _names(
    """
    attention_multiplier attn_logit_softcapping attn_output_gate clip_qkv embedding_multiplier
    final_logit_softcapping kv_lora_rank logit_scale logits_scaling n_routed_experts no_rope_layers num_experts
    num_kv_shared_layers num_local_experts qk_layernorm query_pre_attn_scalar residual_multiplier
    rope_local_base_freq use_qk_norm
    """
)


def strict(family: Family) -> Family:
    """A family that refuses each field that it neither reads nor knows to be harmless."""
    known = READ | HARMLESS | family.absent.keys() | family.ignored.keys() | family.only.keys()

    def unknown(name: str, value: object) -> bool:
        return name not in known and not name.startswith("_") and not name.endswith(ENDINGS)

    return _checked(family, unknown, with_ropes=True)


def lenient(family: Family) -> Family:
    """A family of which many files carry odd fields: it refuses those with a meaning in other architectures."""

    def unknown(name: str, value: object) -> bool:
        return name in ELSEWHERE and (value is True or value not in (0, 1)) and not (family.qk_norm and "qk_" in name)

    return _checked(family, unknown, with_ropes=False)


def _checked(family: Family, unknown: Callable[[str, object], bool], with_ropes: bool) -> Family:
    inner = family.read or fields_of

    def read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = config["model_type"]
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size") if with_ropes else ():
            check_int(name, config.get(name), 1, MAX_DIMENSION)
        for name, value in config.items():
            if value is not None and value is not False and unknown(name, value):
                _refuse(config, name, value)
        for place in ("rope_parameters", "rope_scaling") if with_ropes else ():
            for name, value in _flat(config.get(place)):
                if value is not None and name not in ROPE | ROPE_OF.get(kind, set()):
                    _refuse(config, f"{place}.{name}", value)
        return inner(family, config)

    return replace(family, read=read)


def _flat(rope: object) -> Collection[tuple[str, object]]:
    """The parameters of a rope, or of the ropes of several kinds of layers."""
    if not isinstance(rope, Mapping):
        return []
    sets = [value for value in rope.values() if isinstance(value, Mapping)]
    return [pair for one in sets for pair in one.items()] or [*rope.items()]


def _refuse(config: Mapping[str, Any], name: str, value: object) -> None:
    classes = config.get("architectures")
    name_of_class = ", ".join(map(str, classes)) if isinstance(classes, list) and classes else config["model_type"]
    raise ConfigError(
        f"{name_of_class}: {name} is {value!r}, which is not known for this class and could change the result"
    )
