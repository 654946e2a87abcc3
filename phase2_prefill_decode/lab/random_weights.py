"""Models of transformers with random weights, for benchmarks and as oracles."""

from pathlib import Path
from typing import Any

import torch

from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig


def save_random(shape: str, directory: Path) -> None:
    """Random weights, in the layout of transformers."""
    random_peer(SHAPES[shape], torch.bfloat16).save_pretrained(directory)


def random_peer(config: ModelConfig, dtype: torch.dtype) -> Any:
    """A model of transformers with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    return make.from_config(peer_config(config), dtype=dtype).eval()


def peer_config(config: ModelConfig) -> Any:
    """The same architecture for transformers."""
    from transformers import Qwen3Config

    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings",
    )  # fmt: skip
    return Qwen3Config(**{name: getattr(config, name) for name in names})
