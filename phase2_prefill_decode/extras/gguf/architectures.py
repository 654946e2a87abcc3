"""The architectures of GGUF files, as llama.cpp's converter writes them: each by its differences from Llama's."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from phase0_request.extras.gguf_file import GGUFHeader
from phase0_request.support.checks import ConfigError, check_int
from phase2_prefill_decode.extras.families.qwen import TILED

MAX_SIZE = 1 << 24  # the most of anything that is counted here before ModelConfig checks it
MAX_LAYERS = 1 << 16
NONE: Mapping[str, str] = MappingProxyType({})


class ModelMetadata(NamedTuple):
    """The metadata of a file about its model."""

    header: GGUFHeader
    kind: str

    def get(self, name: str, default: float | None = None) -> Any:
        """A number. ConfigError if it is missing and has no default."""
        return self.header.get(f"{self.kind}.{name}", (int, float), default)

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        return check_int(f"{self.header.file}: {self.kind}.{name}", self.get(name, default), least, most)

    def each(self, name: str, default: int | None = None) -> list[int]:
        """A number for each layer, or one for all."""
        value = self.header.get(f"{self.kind}.{name}", (int, float, list), default)
        values = value if isinstance(value, list) else [value]
        for number in values:
            if not isinstance(number, int) or not 0 <= number <= MAX_SIZE:  # or a bool
                raise ConfigError(f"{self.header.file}: {self.kind}.{name} must be integers from 0, got {number!r}")
        return values

    @property
    def drafting(self) -> range:
        """The layers that draft tokens: the last ones of the file. They are not loaded."""
        number = self.count("nextn_predict_layers", 0, 0, MAX_LAYERS)
        layers = self.count("block_count", most=MAX_LAYERS) if number else 0
        return range(layers - number, layers)

    @property
    def layers(self) -> int:
        """The layers that are loaded."""
        return self.count("block_count", most=MAX_LAYERS) - len(self.drafting)


Own = Callable[[ModelMetadata, dict[str, Any]], dict[str, Any]]


class Architecture(NamedTuple):
    """The differences of an architecture."""

    model_type: str
    names: Mapping[str, str] = NONE  # of modules, or of tensors, that stand for others than in most files
    turned: bool = False  # whether the converter reorders the rows of q and k
    windows: bool = False  # in some layers, or in all
    partial: bool = False  # a part of a head may be rotated
    own: Own = lambda metadata, rope: {}  # what its config.json has besides, from the metadata and the rope


def _gemma3(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    heads = metadata.count("attention.head_count")
    large = metadata.get("block_count") == LAYERS_OF_27B
    return {
        "query_pre_attn_scalar": metadata.count("embedding_length") // heads
        if large
        else metadata.get("attention.key_length", metadata.count("embedding_length") // heads),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": metadata.get("attention.sliding_window_pattern", 6),
    }


LAYERS_OF_27B = 62  # Gemma 3 27B, whose scores alone have a scale of their own; no file says so


def _granite(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": metadata.get("attention.scale"),
        "embedding_multiplier": metadata.get("embedding_scale"),
        "residual_multiplier": metadata.get("residual_scale"),
        "logits_scaling": metadata.get("logit_scale"),
    }


def _lfm2(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    """A layer without keys is one with a convolution."""
    kinds = ["full_attention" if heads else "conv" for heads in metadata.each("attention.head_count_kv")]
    return {
        "layer_types": kinds,
        "conv_L_cache": metadata.get("shortconv.l_cache"),
        "norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _mistral3(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    growth = metadata.get("attention.temperature_scale", 0)
    return {"rope_parameters": rope | ({"llama_4_scaling_beta": growth} if growth else {})}


def _olmo2(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    """Olmo 3 is the one with windows. Layers with a window have a rope without the extension."""
    if not (window := metadata.count("attention.sliding_window", 0, 0)):
        return {}
    windowed = metadata.each("attention.sliding_window_pattern", 4)
    if len(windowed) == 1:  # one layer in each period has no window
        every = metadata.count("attention.sliding_window_pattern", 4)
        windowed = [bool(number % every) for number in range(1, metadata.layers + 1)]
    local = {"rope_theta": metadata.get("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if windows else "full_attention" for windows in windowed],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _qwen35(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    heads = metadata.count("ssm.time_step_rank")
    return {
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "linear_conv_kernel_dim": metadata.get("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.get("ssm.state_size"),
        "linear_value_head_dim": metadata.count("ssm.inner_size") // heads,
        TILED: True,
    } | (_shared(metadata, rope) if metadata.get("expert_count", 0) else {})


def _shared(metadata: ModelMetadata, rope: dict[str, Any]) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length")}


QWEN35 = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", own=_shared),
    "qwen3moe": Architecture("qwen3_moe"),
    "olmoe": Architecture("olmoe"),
    "smollm3": Architecture("smollm3", turned=True),
    "granite": Architecture("granite", turned=True, own=_granite),
    "mistral3": Architecture("ministral3", turned=True, own=_mistral3),
    "gpt-oss": Architecture(  # no file says that it does not truncate
        "gpt_oss", windows=True, own=lambda metadata, rope: {"rope_parameters": rope | {"truncate": False}}
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        windows=True,
        own=_gemma3,
    ),
    "olmo2": Architecture("olmo2", {"post_ffw_norm": "post_feedforward_layernorm"}, windows=True, own=_olmo2),
    "phi3": Architecture(  # whose config.json has it beside the rope, and 4096 if it has not
        "phi3",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows=True,
        partial=True,
        own=lambda metadata, rope: {
            "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length", 4096)
        },
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            "token_embd_norm": "model.norm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        own=_lfm2,
    ),
    "qwen35": Architecture("qwen3_5_text", QWEN35, partial=True, own=_qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", QWEN35, partial=True, own=_qwen35),
}  # fmt: skip
