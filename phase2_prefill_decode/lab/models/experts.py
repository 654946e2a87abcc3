"""`python -m phase2_prefill_decode.lab models.experts`: decodes of an OLMoE shape on the CPU, beside transformers.

A step reads the weights of the experts that some token chose. A batch of dense layers reads no more than one request;
a batch of experts does. The shape is OLMoE's (64 experts, of which a token goes through 8) with few layers and a small
vocabulary. Tokens are sampled, because greedy answers of random weights soon agree, and so would their experts.
"""

import tempfile
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase2_prefill_decode.connect import quantization
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.families.experts import RoutedExperts
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 1024,
    "max_position_embeddings": 256, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPT, STEPS, ROUNDS = 16, 24, 3
REQUESTS = 1, 8
Generate = Callable[[list[list[int]], int], object]  # prompts, and the tokens of each answer


def ours(model: Model) -> Generate:
    def generate(prompts: list[list[int]], tokens: int) -> object:
        params = SamplingParams(temperature=1, max_tokens=tokens, ignore_eos=True)
        return static(model, batch_size=len(prompts), seed=0).generate(prompts, params)

    return generate


def theirs(model: Any) -> Generate:
    from transformers import GenerationConfig

    config: Any = GenerationConfig

    def generate(prompts: list[list[int]], tokens: int) -> object:
        how = config(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
        rows = torch.tensor(prompts)
        with torch.inference_mode():
            return model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=how)

    return generate


def step_ms(generate: Generate, requests: int, round_: int) -> float:
    """The time of a decode step: what STEPS more tokens take."""
    draw = torch.Generator().manual_seed(round_)
    prompts = torch.randint(SHAPE["vocab_size"], (requests, PROMPT), generator=draw).tolist()
    times = []
    for tokens in (1, 1 + STEPS):
        start = time.perf_counter()
        generate(prompts, tokens)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) * 1e3 / STEPS


def experts_read(model: Model, requests: int) -> float:
    """The experts whose weights a layer reads in a decode step."""
    found: list[int] = []
    experts = [layer.mlp.down_proj for layer in model.decoder.layers if isinstance(layer.mlp.down_proj, RoutedExperts)]
    for each in experts:

        def route(x: torch.Tensor, own: Any = each.route) -> tuple[torch.Tensor, torch.Tensor]:
            chosen, shares = own(x)
            if len(x) == requests:
                found.append(len(chosen.unique()))
            return chosen, shares

        each.route = route  # type: ignore[method-assign]
    step_ms(ours(model), requests, 0)
    for each in experts:
        del each.route
    return mean(found)


def measure(progress: Callable[[str], None]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, OlmoeConfig

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    peer = make.from_config(OlmoeConfig(**SHAPE), dtype=torch.bfloat16).eval()
    progress("transformers' model is made")
    with tempfile.TemporaryDirectory() as directory:
        peer.save_pretrained(directory)
        config = ModelConfig.from_pretrained(directory)
        models = {"bfloat16": Model.load(directory, device="cpu")}
        models["int8"] = Model.load(directory, device="cpu", transform=quantization("int8"))
    progress("this engine's models are loaded")
    ways = {name: ours(model) for name, model in models.items()} | {"transformers": theirs(peer)}
    for generate in ways.values():
        step_ms(generate, REQUESTS[0], 0)
    times: dict[str, dict[int, list[float]]] = {name: {count: [] for count in REQUESTS} for name in ways}
    for round_ in range(ROUNDS):
        for count in REQUESTS:
            for name, generate in ways.items():
                times[name][count].append(step_ms(generate, count, round_))
        progress(f"round {round_ + 1} of {ROUNDS}")
    few, many = REQUESTS
    rows: dict[str, Any] = {}
    for name in ways:
        one, together = (median(times[name][count]) for count in REQUESTS)
        rows[name] = {
            "step_ms_1": one, f"step_ms_{many}": together, "tokens_per_second_1": few * 1e3 / one,
            f"tokens_per_second_{many}": many * 1e3 / together, "ratio": many * one / together,
        }  # fmt: skip
    read = {f"requests_{count}": experts_read(models["bfloat16"], count) for count in REQUESTS}
    return {"shape": SHAPE, "parameters": config.parameters, "decode": rows, "experts_read": read}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab models.experts", __doc__)
    options = p.parse_args(arguments)
    console = Console()
    figures = measure(lambda words: console.print(words, style="dim"))
    section(console, "Decodes of 1 and of several requests", figures["decode"])
    section(console, "Experts of a layer that a step reads", {"of 64": figures["experts_read"]})
    finish(p, options, arguments, figures, console=console)
    return 0
