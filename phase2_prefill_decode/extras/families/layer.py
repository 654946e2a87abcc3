"""FamilyLayer: a layer that differs from the core's, as data. It is read from a config.json, and needs no torch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number
from phase2_prefill_decode.loading.config import MAX_DIMENSION, LayerConfig, LayerTensor, ModelConfig


class Norms(NamedTuple):
    """The checkpoint's names of the norms around attention and around the MLP; None: no norm in this place."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


NORMS = {
    "before": Norms("input_layernorm", None, "post_attention_layernorm", None),
    "after": Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": Norms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
ACTIVATIONS = "silu", "gelu_pytorch_tanh"
ROUTER = "router"
SHARED_EXPERT = "shared_expert_"  # before the names of its matrices
SHARED_SIZE = "shared_expert_intermediate_size"
MAX_EXPERTS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Many MLPs in place of one: a router chooses a few of them for each token."""

    number: int
    top_k: int  # that a token goes through
    inner: int  # the intermediate size of each
    norm_topk: bool  # the probabilities of the chosen are divided by their sum
    bias: bool = False  # the router and the experts have biases
    shared: int = 0  # the intermediate size of an expert that every token goes through, times a gate; 0 without one

    def __post_init__(self) -> None:
        check_int("num_experts", self.number, 1, MAX_EXPERTS)
        check_int("num_experts_per_tok", self.top_k, 1, self.number)
        check_int("moe_intermediate_size", self.inner, 1, MAX_DIMENSION)
        check_bool("norm_topk_prob", self.norm_topk)
        check_bool("bias", self.bias)
        check_int(SHARED_SIZE, self.shared, 0, MAX_DIMENSION)

    def tensors(self, hidden: int) -> dict[str, LayerTensor]:
        """Each matrix stacks the matrices of all experts."""
        gate_up, down = dict[str, int](), dict[str, int]()
        for place in (f"mlp.experts.{number}" for number in range(self.number)):
            gate_up |= {f"{place}.gate_proj": self.inner, f"{place}.up_proj": self.inner}
            down[f"{place}.down_proj"] = hidden
        expert = "mlp.shared_expert"
        shared = {
            f"{SHARED_EXPERT}gate_up_proj": LayerTensor(
                {f"{expert}.gate_proj": self.shared, f"{expert}.up_proj": self.shared}, hidden
            ),
            f"{SHARED_EXPERT}down_proj": LayerTensor({f"{expert}.down_proj": hidden}, self.shared),
            f"{SHARED_EXPERT}gate": LayerTensor({f"{expert}_gate": 1}, hidden),
        }
        return {
            ROUTER: LayerTensor({"mlp.gate": self.number}, hidden, self.bias),
            "gate_up_proj": LayerTensor(gate_up, hidden, self.bias),
            "down_proj": LayerTensor(down, self.inner, self.bias),
            **(shared if self.shared else {}),
        }

    def part(self, ranks: int) -> "Experts":
        """What each of several ranks has: a part of every expert."""
        for name, size in (("moe_intermediate_size", self.inner), (SHARED_SIZE, self.shared)):
            if size % ranks:
                raise ConfigError(f"tensor_parallel_size must divide the model's {name}, {size}; got {ranks}")
        return replace(self, inner=self.inner // ranks, shared=self.shared // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyLayer(LayerConfig):
    """Each field is one difference from the layer of Llama."""

    norms: str = "before"  # of NORMS: where a norm is
    norms_rows: bool = False  # q and k are normed over all heads, not head by head
    activation: str = "silu"
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    input_multiplier: float = 1.0  # of the embeddings, in the first layer
    query_growth: tuple[float, int] | None = None  # q * (1 + first * log(1 + position // second))
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual
    experts: Experts | None = None  # in place of the MLP
    sinks: bool = False  # of attention, one for each head
    clamped: tuple[float, float] | None = None  # alpha and limit of gpt-oss's SwiGLU

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        check_choice("norms", self.norms, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        for name in ("input_multiplier", "residual_multiplier"):
            check_number(name, getattr(self, name), 0, above=True)
        if self.scale is not None:
            check_number("scale", self.scale, 0, above=True)
        for name, number in zip(("swiglu_alpha", "swiglu_limit"), self.clamped or (), strict=False):
            check_number(name, number, 0, above=True)

    def part(self, ranks: int) -> "FamilyLayer":
        """What each of several ranks has of this layer."""
        if self.norms_rows:
            raise ConfigError(
                f"tensor_parallel_size must be 1, because this model norms q and k across all heads and a rank holds "
                f"only some of them; got {ranks}"
            )
        return self if self.experts is None else replace(self, experts=self.experts.part(ranks))

    def tensors(self, config: ModelConfig) -> dict[str, LayerTensor]:
        tensors = LayerConfig.tensors(self, config)
        del tensors["input_layernorm"], tensors["post_attention_layernorm"]
        for place, module in NORMS[self.norms]._asdict().items():
            if module is not None:
                tensors[place] = LayerTensor({module: config.hidden_size})
        if self.norms_rows:
            for name, heads in (("q_norm", config.num_attention_heads), ("k_norm", config.num_key_value_heads)):
                tensors[name] = LayerTensor({f"self_attn.{name}": heads * config.head_dim})
        if self.sinks:
            tensors["sinks"] = LayerTensor({"self_attn.sinks": config.num_attention_heads})
        return tensors if self.experts is None else tensors | self.experts.tensors(config.hidden_size)
