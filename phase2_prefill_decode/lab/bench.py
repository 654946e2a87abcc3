"""`python -m phase2_prefill_decode.lab bench`: compares this engine with transformers' `generate`, on the same weights.

Both run greedy, without an end of sequence, in turn, and of each the best run counts. Results of other engines on the
same machine can be put beside: --beside reads lines such as `requests=8 prompt=128 output=64 …: 7.02 s` from a file,
and the engine's version from where it first says `version …`.
"""

import argparse
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.model import Model, default_device

LINE = re.compile(r"requests=(\d+) prompt=(\d+) output=(\d+)\b.*?: ([\d.]+) s")
VERSION = re.compile(r"\bversion[ :=]+v?(\d\S*)")
Generate = Callable[[list[list[int]], int], list[list[int]]]
Rates = dict[str, dict[str, float]]  # tokens a second by workload, then by engine


class Workload(NamedTuple):
    """Concurrent requests with prompts and outputs of these lengths."""

    requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}"

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(10, vocabulary - 10) for _ in range(self.prompt)] for _ in range(self.requests)]

    def rate(self, seconds: float) -> float:
        """Tokens a second: of the answers, or of the prompts if the answers are of one token."""
        return self.requests * (self.output if self.output > 1 else self.prompt) / seconds


WORKLOADS = (Workload(1, 16, 64), Workload(8, 128, 64), Workload(16, 128, 64), Workload(4, 512, 1))


def theirs(directory: Path, device: torch.device) -> Generate:
    """The engine of transformers: its model class and `generate`."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model = model.to(device).eval()
    make: Any = GenerationConfig

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        how = make(do_sample=False, max_new_tokens=output, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            tokens = torch.tensor(prompts, device=device)
            whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        return [row[len(prompts[0]) :].tolist() for row in whole]

    return generate


def ours(directory: Path, device: torch.device) -> Generate:
    engine = static(Model.load(directory, device=device, dtype="bfloat16"))

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return [completion.output_tokens for completion in engine.generate(prompts, params)]

    return generate


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


def measure(shape: str, device: torch.device, runs: int, console: Console) -> Rates:
    """Run every workload on both engines, in turn."""
    rates: Rates = {}
    with tempfile.TemporaryDirectory() as folder:
        save_random(shape, Path(folder))
        engines = {"nano-serving": ours(Path(folder), device), "transformers": theirs(Path(folder), device)}
        for workload in track(WORKLOADS, shape, console=console, transient=True):
            best = dict.fromkeys(engines, float("inf"))
            for run in range(runs + 1):  # the first warms up
                output = workload.output if run else 2
                prompts = workload.prompts(SHAPES[shape].vocab_size, run)
                for name, generate in engines.items():
                    start = time.perf_counter()
                    answers = generate(prompts, output)
                    seconds = time.perf_counter() - start
                    if any(len(answer) != output for answer in answers):
                        raise RuntimeError(f"{name} did not answer {workload.name} in full")
                    best[name] = min(best[name], seconds) if run else best[name]
            rates[workload.name] = {name: workload.rate(seconds) for name, seconds in best.items()}
    return rates


def peer_rates(text: str) -> Iterator[tuple[str, float]]:
    """The workloads in what another engine printed, each with its tokens a second."""
    known = {workload.name for workload in WORKLOADS}
    for line in text.splitlines():
        if (match := LINE.search(line)) and "shared=5" not in line:
            workload = Workload(*(int(number) for number in match.groups()[:3]))
            if workload.name in known:
                yield workload.name, workload.rate(float(match[4]))


def beside(option: str) -> tuple[str, str, str]:
    """SHAPE:NAME=FILE as the shape, the name, and the text of the file."""
    shape, _, rest = option.partition(":")
    name, _, file = rest.partition("=")
    if shape not in SHAPES or not name or not file:
        raise argparse.ArgumentTypeError(f"{option!r} must be SHAPE:NAME=FILE with a shape of {', '.join(SHAPES)}")
    text = Path(file).read_text("utf-8")
    if not any(peer_rates(text)):
        raise argparse.ArgumentTypeError(f"{file} has no line for any of the workloads")
    return shape, name, text


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab bench", __doc__)
    p.add_argument("--shape", choices=SHAPES, action="append", help="may be given again (default: 17m)")
    p.add_argument("--runs", type=at_least_one, default=3, help="of which the best counts (%(default)s)")
    p.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="on a CPU (%(default)s)")
    p.add_argument("--beside", type=beside, action="append", default=[], metavar="SHAPE:NAME=FILE", help="of a peer")
    options = p.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console, device, figures = Console(), default_device(), dict[str, Any]()
    for shape in options.shape or ["17m"]:
        rates = measure(shape, device, options.runs, console)
        for other, name, text in options.beside:
            for workload, rate in peer_rates(text) if other == shape else ():
                rates[workload][name] = rate
        engines = list(dict.fromkeys(name for row in rates.values() for name in row))
        rows = [(workload, *(row.get(name, "") for name in engines)) for workload, row in rates.items()]
        title = f"{shape}: tokens a second, requests x prompt + answer"
        console.print(table(("", *engines), rows, title=title), "")
        figures[shape] = {
            workload: row | {f"over_{name}": row["nano-serving"] / rate for name, rate in [*row.items()][1:]}
            for workload, row in rates.items()
        }
    if options.beside:
        versions = {name: VERSION.search(text) for _, name, text in options.beside}
        figures["peers"] = {name: match[1] if match else None for name, match in versions.items()}
    finish(p, options, arguments, figures, gpu=device.type == "cuda")
    return 0


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)
