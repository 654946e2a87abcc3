"""Small random models of transformers' own classes: the oracle of this phase and later ones."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from phase0_request.tokenizer import BUNDLED

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 24},
}  # further small sizes of a family

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64},
}

# Each family with each of its options. The names are for `pytest.mark.parametrize`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    **{f"{family}-one-kv-head": (family, {"num_key_value_heads": 1}) for family in FAMILIES},
    **{f"{family}-{kind}": (family, {"rope_parameters": ROPES[kind]}) for family in FAMILIES for kind in ROPES},
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 40}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A model of a family, small and random, with any options that its configuration takes.

    Its biases are not zero and its norms not one, as they would be if transformers made them, so that no test passes
    without them. Its layers are loud beside its embedding, so that what it writes varies and does not end in a loop.
    """
    chosen = deepcopy(
        {"pad_token_id": None} | SIZES | OWN.get(family, {}) | options
    )  # a configuration writes into what it is given
    config = AutoConfig.for_model(family, **chosen, attn_implementation="eager")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.normal_(1, 0.2, generator=draw)
            elif tensor.dim() == 1 or name.endswith("bias"):
                tensor.normal_(0, 1 if "sinks" in name else 0.2, generator=draw)
            else:
                tensor.normal_(0, (1.5 if ".layers." in name else 1) * tensor.shape[1] ** -0.5, generator=draw)
    return cast(PreTrainedModel, cast(Any, model).to(dtype).eval())


def variant(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One of VARIANTS, by its name."""
    family, options = VARIANTS[name]
    return tiny_model(family, seed=seed, dtype=dtype, **options)


def saved(model: PreTrainedModel, directory: Path, *, shards_of: str = "1GB") -> Path:
    """Save a model as transformers does, and return the directory. Shards of "20KB" make several files."""
    model.save_pretrained(directory, max_shard_size=shards_of)
    return directory


def padded_bundle(directory: Path, rows: int = 8) -> Path:
    """The bundled model with a padded vocabulary: lm_head has `rows` more rows than the tokenizer has tokens, and
    their logits are the largest at many positions: they are those of the mean embedding, 12 times, with either sign."""
    shutil.copytree(BUNDLED, directory / "padded")
    tensors = load_file(BUNDLED / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    ends = 12 * embedding.float().mean(0).to(embedding.dtype)
    tensors["lm_head.weight"] = torch.cat((embedding, *([[ends, -ends][i % 2][None] for i in range(rows)])))
    tensors["model.embed_tokens.weight"] = torch.cat((embedding, torch.zeros(rows, embedding.shape[1]).to(embedding)))
    save_file(tensors, directory / "padded" / "model.safetensors")
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"vocab_size": len(embedding) + rows, "tie_word_embeddings": False}
    (directory / "padded" / "config.json").write_text(json.dumps(config))
    return directory / "padded"
