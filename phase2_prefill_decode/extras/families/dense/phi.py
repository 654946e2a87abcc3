"""Phi 3: Llama with q, k, v and gate, up fused in its files, heads of which a part is rotated, and LongRoPE."""

import math
from collections.abc import Mapping
from typing import Any

from phase0_request.support.checks import ConfigError, check_choice, check_int, check_number
from phase2_prefill_decode.loading.config import LayerConfig, RopeParameters
from phase2_prefill_decode.loading.families import MAX_LENGTH, Family, fields_of, rope_of

LONGROPE = "longrope", "su", "yarn"  # its names in older files


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**family.absent, **config}
    written = rope_of(config, partial=True)
    kind = check_choice(
        "rope_type", written.get("rope_type") or written.get("type") or "default", ("default", *LONGROPE)
    )
    plain = {name: written[name] for name in ("rope_theta", "partial_rotary_factor") if written[name] is not None}
    known = fields_of(family, {**config, "rope_scaling": None, "rope_parameters": plain})
    if kind == "default":
        return known
    rope = _longrope(written, plain, known)
    return known | {"layers": tuple(LayerConfig(window=window, rope=rope) for window in known["sliding_windows"])}


def _longrope(written: Mapping[str, Any], plain: Mapping[str, Any], known: Mapping[str, Any]) -> RopeParameters:
    """LongRoPE divides the frequency of each pair by a factor of its own. A file has factors for the original context
    and others beyond it. transformers changes them when a sequence grows over it, and computes all its keys again; here
    all sequences have the factors of the longest that is served, as in llama.cpp: see `longrope`."""
    name = "original_max_position_embeddings"
    original = check_int(name, written.get(name), 2, MAX_LENGTH)
    context = known["max_position_embeddings"]
    head_dim = known["head_dim"] or known["hidden_size"] // known["num_attention_heads"]
    pairs = -(-int(head_dim * plain.get("partial_rotary_factor", 1)) // 2)
    factor = check_number("rope factor", written.get("factor") or context / original, 0, above=True)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short = _factors("short_factor", written, pairs)
    return RopeParameters(
        rope_type="longrope",
        factors=_factors("long_factor", written, pairs) if context > original else short,
        short_factors=short,
        original_max_position_embeddings=original,
        attention_factor=written.get("attention_factor") or scale,
        **plain,
    )


def _factors(name: str, written: Mapping[str, Any], pairs: int) -> tuple[float, ...]:
    factors = written.get(name)
    if not isinstance(factors, list) or len(factors) != pairs:
        raise ConfigError(f"{name} must be a list of {pairs} numbers, one for each pair, got {factors!r}")
    return tuple(check_number(name, number, 0, above=True) for number in factors)


PHI3 = Family(
    absent={
        "num_key_value_heads": None, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "eos_token_id": 32_000, "sliding_window": None,
    },
    ignored={
        "use_sliding_window": True, "max_window_layers": 0, "layer_types": None, "attention_bias": False,
        "mlp_bias": False,
    },
    partial_rotary=True,
    read=_read,
)  # fmt: skip
