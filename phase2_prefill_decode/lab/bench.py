"""`python -m phase2_prefill_decode.lab bench`: compares this engine with transformers' `generate`, on the same weights.

Both run greedy, without an end of sequence, in turn, and of each the best run counts. Results of other engines on the
same machine can be put beside: --beside reads lines such as `requests=8 prompt=128 output=64 …: 7.02 s` from a file,
and the engine's version from where it first says `version …`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from phase0_request.machine import describe, record
from phase0_request.params import SamplingParams
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.lab.comparison import WORKLOADS, Beside, Result, compared, table
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.model import Model, default_device


def theirs(directory: Path, device: torch.device) -> Callable[[list[list[int]], int], list[list[int]]]:
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


def ours(directory: Path, device: torch.device) -> Callable[[list[list[int]], int], list[list[int]]]:
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

    return Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=config.tie_word_embeddings,
    )  # fmt: skip


def measure(shape: str, device: torch.device, runs: int, console: Console) -> Iterator[Result]:
    """Run every workload on both engines, in turn."""
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"{shape}: weights", total=len(WORKLOADS) * (runs + 1))
        save_random(shape, Path(folder))
        engines = {"nano-serving": ours(Path(folder), device), "transformers": theirs(Path(folder), device)}
        for workload in WORKLOADS:
            bar.update(task, description=f"{shape}: {workload.name}")
            best = dict.fromkeys(engines, float("inf"))
            for run in range(runs + 1):  # the first warms up
                prompts = workload.prompts(SHAPES[shape].vocab_size, run)
                for name, generate in engines.items():
                    start = time.perf_counter()
                    answers = generate(prompts, workload.output if run else 2)
                    seconds = time.perf_counter() - start
                    if any(len(answer) != (workload.output if run else 2) for answer in answers):
                        raise RuntimeError(f"{name} did not answer {workload.name} in full")
                    best[name] = min(best[name], seconds) if run else best[name]
                bar.advance(task)
            for name, seconds in best.items():
                yield Result(name, workload.name, seconds, workload.rate(seconds))


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase2_prefill_decode.lab bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--shape", choices=SHAPES, action="append", help="may be given again (default: 17m)")
    p.add_argument("--runs", type=at_least_one, default=3, help="of which the best counts (%(default)s)")
    p.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="on a CPU (%(default)s)")
    p.add_argument(
        "--beside",
        type=Beside.of,
        action="append",
        default=[],
        metavar="SHAPE:NAME=FILE",
        help="the printed results of another engine",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = p.parse_args(arguments)
    shapes: list[str] = options.shape or ["17m"]
    others: list[Beside] = options.beside
    for other in others:
        if other.shape not in shapes:
            p.error(f"{other.option}: that shape is not measured here; those that are: {', '.join(shapes)}")
    torch.set_num_threads(options.threads)
    console, device = Console(), default_device()
    figures: dict[str, Any] = {}
    for shape in shapes:
        results = list(measure(shape, device, options.runs, console))
        for other in others:
            if other.shape == shape:
                results += other.results()
        console.print(table(shape, results), "")
        figures[shape] = compared(results)
    if others:
        figures["peers"] = {other.name: other.version for other in others}
    if options.json is not None:
        machine = describe()
        asked = [*(f"--shape {shape}" for shape in shapes), f"--runs {options.runs}", f"--threads {options.threads}"]
        command = " ".join(["python -m phase2_prefill_decode.lab bench", *asked, *(other.option for other in others)])
        record(options.json, command, figures, device=machine.gpu if device.type == "cuda" else machine.cpu)
        console.print(f"Figures written to {options.json}")
    return 0


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)
