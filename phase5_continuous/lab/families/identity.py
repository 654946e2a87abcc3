"""`python -m phase5_continuous.lab families.identity`: random shapes of every family, beside transformers, by seed.

A shape is drawn from the options of the family's own configuration class, with weights that vary its answers, and is
saved as transformers saves it. An answer passes if each of its tokens is the one that transformers finds likeliest
after those before it, up to rounding. The last column is of bfloat16: there a shape passes if the median error of the
log-probabilities of a prompt's tokens, against float32, is at most twice transformers' own.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.extras.families import supported
from phase2_prefill_decode.extras.families.stateful import has_states
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.extras.parallel.load import load_split
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.extras.checkpoints import CheckpointedPrefixCache
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous

ANSWER = 20  # tokens
NOISE = 2.0  # times transformers' own error in bfloat16
IN_BF16 = "bf16 error < 2x"
TOLERANCE = 2e-5  # of logits in float32: two tokens that are nearer than this tie
WRAPPED = "gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"  # another family inside
Draw = dict[str, Any]


def kinds(draw: Random, layers: int) -> list[str]:
    return [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]


def rope(draw: Random) -> Draw:
    """The rope of a whole model."""
    theta = draw.choice([100.0, 1e4, 5e5])
    return draw.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": draw.choice([2.0, 4.5])},
            {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0, "original_max_position_embeddings": 32},
            {
                "rope_type": "llama3", "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        ]
    )  # fmt: skip


def two_ropes(draw: Random) -> Draw:
    """Of layers with a window and of the others."""
    local = {"rope_type": "default", "rope_theta": draw.choice([100.0, 1e4])}
    return {"sliding_attention": local, "full_attention": rope(draw)}


def phi(draw: Random, head_dim: int) -> Draw:
    """The options of Phi 3. Factors are those of one side of its original context, since its answers cross none."""
    part = draw.choice([1.0, 0.75, 0.5, 0.25])
    pairs = len(range(0, int(head_dim * part), 2))
    written: Draw = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    if draw.random() < 0.6:
        written |= {"rope_type": "longrope"}
        written |= {name: [1 + 4 * draw.random() for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    return {"rope_parameters": written, "original_max_position_embeddings": draw.choice([4, 256])}


def qwen3_5(draw: Random, layers: int) -> Draw:
    """The options of Qwen 3.5."""
    part = draw.choice([0.25, 0.5, 1.0])
    return {
        "layer_types": [*draw.choices(["linear_attention", "full_attention"], k=layers - 1), "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": draw.choice([2, 4]),
        "linear_key_head_dim": draw.choice([8, 16]), "linear_value_head_dim": draw.choice([16, 24]),
        "linear_conv_kernel_dim": draw.choice([2, 4]), "attention_bias": draw.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part},
    }  # fmt: skip


# What a family's configuration has beyond the usual sizes. `layers` and `head_dim` are those drawn.
OWN: Mapping[str, Callable[[Random, int, int], Draw]] = {
    "gemma3_text": lambda draw, layers, head_dim: {
        "layer_types": kinds(draw, layers), "rope_parameters": two_ropes(draw),
        "query_pre_attn_scalar": draw.choice([head_dim, 17]),
    },
    "granite": lambda draw, layers, head_dim: {
        "rope_parameters": rope(draw), "embedding_multiplier": draw.choice([1.0, 3.5]),
        "logits_scaling": draw.choice([1.0, 2.5]), "residual_multiplier": draw.choice([1.0, 0.4]),
        "attention_multiplier": draw.choice([0.1, 0.3]), "attention_bias": draw.random() < 0.5,
    },
    "lfm2": lambda draw, layers, head_dim: {
        "layer_types": [*draw.choices(["conv", "full_attention"], k=layers - 1), "full_attention"],
        "conv_L_cache": draw.choice([2, 3, 4]), "conv_bias": draw.random() < 0.5, "block_auto_adjust_ff_dim": False,
    },
    "llama": lambda draw, layers, head_dim: {
        "rope_parameters": rope(draw), "attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5
    },
    "ministral3": lambda draw, layers, head_dim: {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": draw.choice([1.0, 0.5]), "llama_4_scaling_beta": draw.choice([0.0, 0.4]),
        },
    },
    "mixtral": lambda draw, layers, head_dim: {"num_local_experts": draw.choice([2, 5, 8]), "num_experts_per_tok": 2},
    "olmo3": lambda draw, layers, head_dim: {"layer_types": kinds(draw, layers), "rope_parameters": two_ropes(draw)},
    "olmoe": lambda draw, layers, head_dim: {
        "num_experts": draw.choice([4, 7]), "num_experts_per_tok": draw.choice([1, 3]),
        "norm_topk_prob": draw.random() < 0.5,
    },
    "phi3": lambda draw, layers, head_dim: phi(draw, head_dim),
    "qwen2": lambda draw, layers, head_dim: {
        "rope_parameters": rope(draw), "use_sliding_window": True, "layer_types": kinds(draw, layers)
    },
    "qwen3": lambda draw, layers, head_dim: {
        "rope_parameters": rope(draw), "use_sliding_window": True, "layer_types": kinds(draw, layers),
        "attention_bias": draw.random() < 0.3,
    },
    "qwen2_moe": lambda draw, layers, head_dim: {
        "num_experts": draw.choice([4, 9]), "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([24, 40]), "shared_expert_intermediate_size": draw.choice([16, 72]),
        "norm_topk_prob": draw.random() < 0.5, "mlp_only_layers": draw.choice([[], [0]]),
        "qkv_bias": draw.random() < 0.7, "use_sliding_window": draw.random() < 0.5,
    },
    "qwen3_moe": lambda draw, layers, head_dim: {
        "num_experts": draw.choice([4, 9]), "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([24, 40]), "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice([[], [0]]),
    },
    "qwen3_5_moe_text": lambda draw, layers, head_dim: {
        "num_experts": draw.choice([4, 9]), "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([24, 40]), "shared_expert_intermediate_size": draw.choice([16, 72]),
        **qwen3_5(draw, layers),
    },
    "qwen3_next": lambda draw, layers, head_dim: {
        "num_experts": draw.choice([4, 9]), "num_experts_per_tok": draw.choice([1, 3]),
        "moe_intermediate_size": draw.choice([24, 40]), "shared_expert_intermediate_size": draw.choice([16, 72]),
        "norm_topk_prob": draw.random() < 0.7, **qwen3_5(draw, layers),
    },
    "qwen3_5_text": lambda draw, layers, head_dim: qwen3_5(draw, layers),
    "smollm3": lambda draw, layers, head_dim: {
        "rope_parameters": rope(draw), "no_rope_layers": [draw.randint(0, 1) for _ in range(layers)]
    },
}  # fmt: skip
WINDOWED = "gemma3_text", "ministral3", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3"
FROM_ZERO = (
    "gemma3_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)  # norms multiply by one plus their weight
TIED_TO_HIDDEN = "olmo2", "olmo3", "olmoe", "phi3", "granite", "qwen2_moe"  # heads: hidden_size / num_attention_heads


def shape(family: str, seed: int) -> Draw:
    """The options of a small configuration."""
    draw = Random(f"{family} {seed}")
    kv, groups, layers = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4]), draw.randint(1, 4)
    head_dim = draw.choice([8, 16, 24, 40, 64])
    options: Draw = {
        "vocab_size": draw.choice([101, 256, 307, 515]),
        "hidden_size": kv * groups * head_dim if family in TIED_TO_HIDDEN else 8 * kv * groups * draw.randint(1, 4),
        "intermediate_size": draw.choice([8 * draw.randint(5, 17), 64, 128]),  # 64s: one call a step on CPUs
        "num_hidden_layers": layers,
        "num_attention_heads": kv * groups,
        "num_key_value_heads": kv,
        "max_position_embeddings": 256,
        "tie_word_embeddings": draw.random() < 0.4,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family not in TIED_TO_HIDDEN:
        options["head_dim"] = head_dim
    if family in WINDOWED:
        options["sliding_window"] = draw.choice([3, 7, 16, 33, 500])
    own = OWN.get(family)
    return options if own is None else options | own(draw, layers, head_dim)


def random_model(family: str, options: Draw, seed: int) -> Any:
    """A model of transformers. Norms are not one and biases not zero; layers are loud beside the embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **json.loads(json.dumps(options)), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.normal_(0 if family in FROM_ZERO else 1, 0.2, generator=draw)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.2, generator=draw)
            else:
                scale = (1.5 if ".layers." in name else 1.0) * tensor.shape[-1] ** -0.5
                tensor.normal_(0, scale, generator=draw)
    return model.eval()


def again(directory: Path, dtype: torch.dtype) -> Any:
    """The model that was saved. Another dtype than the saved one would also round what is computed from the config."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    return make.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def cache(model: Model, pages: int, page_size: int) -> PagedCache:
    if has_states(model.config):
        return CheckpointedPrefixCache(8, pages, page_size)
    return PrefixCache(pages, page_size)


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine, and prompts for it."""

    engine: Callable[[Model], Engine[Any]]
    shared: bool = False  # prompts begin alike
    ranks: int = 1
    refused: bool = False  # for some models


SETTINGS: Mapping[str, Setting] = {
    "plain": Setting(static),
    "chunks": Setting(lambda model: continuous(model, TokenBudget(7), cache=cache(model, 64, 8))),
    "tiny pool": Setting(lambda model: continuous(model, TokenBudget(16), cache=cache(model, 14, 8), max_running=4)),
    "prefix": Setting(
        lambda model: continuous(model, TokenBudget(64), cache=cache(model, 64, 4), ahead=1), shared=True
    ),
    "2 ranks": Setting(static, ranks=2, refused=True),
}


def prompts(vocabulary: int, seed: int, shared: bool) -> list[list[int]]:
    draw = Random(seed)
    lengths = (33, 2, 9, 30) if shared else (1, 5, 17, 50, 64)
    first, *rest = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    return [first + end for end in rest] if shared else [first, *rest]


@contextmanager
def loaded(directory: Path, ranks: int) -> Iterator[Model]:
    if ranks == 1:
        yield Model.load(directory, device="cpu", dtype="float32")
        return
    model = load_split(directory, ranks, device="cpu", dtype="float32")
    assert model.decoder.processes is not None
    try:
        yield model
    finally:
        model.decoder.processes.close()


def behind(oracle: Any, directory: Path, setting: Setting, seed: int) -> float:
    """How far at most a token is below the likeliest, relative to the largest logit."""
    worst = 0.0
    with loaded(directory, setting.ranks) as model:
        given = prompts(oracle.config.vocab_size, seed, setting.shared)
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        for prompt, answer in zip(given, setting.engine(model).generate(given, params), strict=True):
            with torch.inference_mode():
                rows = oracle(torch.tensor([prompt + list(answer.output_tokens)])).logits[0, len(prompt) - 1 : -1]
            drawn = rows.gather(-1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
            worst = max(worst, float((rows.amax(-1) - drawn).max() / max(1.0, float(rows.abs().max()))))
    return worst


def error_in_bf16(oracle: Any, directory: Path, seed: int) -> float:
    """The median error of log-probabilities of prompts in bfloat16, relative to transformers' own. It is the median,
    and over several prompts, since rounding may choose another expert at some positions."""
    given = [prompts(oracle.config.vocab_size, 4 * seed + number, shared=False)[-1] for number in range(4)]
    model = Model.load(directory, device="cpu", dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    answers = static(model).generate(given, params)
    scores = [score for answer in answers for score in extras_of(answer.request).prompt_logprobs]
    ours = torch.tensor([score.logprob for score in scores])

    def theirs(model: Any) -> Tensor:
        tokens = torch.tensor(given)
        with torch.inference_mode():
            rows = model(tokens).logits[:, :-1].float().log_softmax(-1)
        found: Tensor = rows.gather(-1, tokens[:, 1:, None]).flatten()
        return found

    own, wanted = theirs(again(directory, torch.bfloat16)), theirs(oracle)
    return float((ours - wanted).abs().median() / (own - wanted).abs().median().clamp(1e-6))


def compare(family: str, seed: int, settings: Mapping[str, Setting]) -> dict[str, str]:
    """A verdict for each setting."""
    options, found = shape(family, seed), {}
    stored = Random(seed).choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    oracle = random_model(family, options, seed).to(stored)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        oracle.save_pretrained(directory, max_shard_size=Random(seed).choice(["1GB", "30KB"]))
        oracle = again(directory, torch.float32)
        for name, setting in settings.items():
            try:
                far = behind(oracle, directory, setting, seed)
                found[name] = "same" if far < TOLERANCE else f"{far:.1e} below"
            except ConfigError as error:
                found[name] = "refused" if setting.refused else f"refused: {error}"
        times = error_in_bf16(oracle, directory, seed)
        found[IN_BF16] = "same" if times < NOISE else f"{times:.1f} x"
    return found


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab families.identity", __doc__)
    names = sorted({*supported().values()} - {*WRAPPED})
    p.add_argument("--families", nargs="+", default=names, choices=names, metavar="FAMILY")
    p.add_argument("--seeds", type=int, default=4)
    p.add_argument("--first", type=int, default=0, help="the first seed")
    p.add_argument("--ranks", action=argparse.BooleanOptionalAction, default=True, help="processes of two ranks too")
    options, console = p.parse_args(arguments), Console(highlight=False)
    settings = {name: setting for name, setting in SETTINGS.items() if options.ranks or setting.ranks == 1}
    figures: dict[str, dict[str, dict[str, int]]] = {}
    failures: list[str] = []
    for family in options.families:
        counts = figures.setdefault(family, {})
        for seed in range(options.first, options.first + options.seeds):
            for name, verdict in compare(family, seed, settings).items():
                count = counts.setdefault(name, {"same": 0, "refused": 0, "other": 0})
                count[verdict if verdict in count else "other"] += 1
                if verdict not in ("same", "refused"):
                    failures.append(f"{family}, seed {seed}, {name}: {verdict}; {shape(family, seed)}")
                    console.print(failures[-1], style="red")
    columns = [*settings, IN_BF16]
    rows = [(family, *(_cell(counts[name]) for name in columns)) for family, counts in figures.items()]
    console.print(table(("", *columns), rows))
    finish(p, options, arguments, {"seeds": options.seeds, "families": figures, "failures": len(failures)})
    return 1 if failures else 0


def _cell(count: Mapping[str, int]) -> str:
    shown = f"{count['same']} of {sum(count.values()) - count['refused']}"
    return f"{shown}, {count['refused']} refused" if count["refused"] else shown
