"""The models of a comparison: random weights in a few shapes, and one model with trained weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from phase2_prefill_decode.lab.random_weights import random_peer
from phase2_prefill_decode.lab.shapes import SHAPES

CONTEXT = 1 << 15  # tokens that models with random weights are made for
LFM2: dict[str, Any] = {  # as the config.json of LFM2-350M, with the size of its MLP after the adjustment
    "vocab_size": 65_536, "hidden_size": 1024, "intermediate_size": 4608, "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 16,
    "num_key_value_heads": 8, "conv_L_cache": 3,
}  # fmt: skip


class PeerModel(NamedTuple):
    vocab_size: int
    save: Callable[[Path], None]  # to a directory, in bfloat16


def save_shape(shape: str, directory: Path) -> None:
    random_peer(replace(SHAPES[shape], max_position_embeddings=CONTEXT), torch.bfloat16).save_pretrained(directory)


def save_lfm2(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, Lfm2Config

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    config = Lfm2Config(**LFM2, max_position_embeddings=CONTEXT)
    make.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def transformers_model(file: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with patch("transformers.modeling_utils.is_accelerate_available", return_value=True):  # asked for, and not used
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def save_gemma(directory: Path) -> None:
    """The model of a GGUF file, and the file beside it."""
    from phase6_integration.engine.hub import directory_of

    file = Path(directory_of("gemma3-270m"))
    model = transformers_model(file).bfloat16()
    model.hf_quantizer = None  # it would not be saved
    del model.config.quantization_config
    model.save_pretrained(directory)
    (directory / "Q4_K_M.gguf").symlink_to(file)


MODELS = {
    **{shape: PeerModel(config.vocab_size, partial(save_shape, shape)) for shape, config in SHAPES.items()},
    "gemma3-270m": PeerModel(262_144, save_gemma),
    "lfm2-350m": PeerModel(LFM2["vocab_size"], save_lfm2),
}
