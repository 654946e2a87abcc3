"""`nanoserve bench serve` beside `vllm bench serve` on one server: do two load generators measure the same?

Both send requests of one length at one even rate, and take turns; the median of the rounds counts. vLLM is in the
environment that peers/setup.sh makes, and only its client runs. The names are the same, and what each said is kept.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.tokenizer import BUNDLED
from phase6_integration.lab.bench import Bench
from phase6_integration.lab.peers.compare import interpreter
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.workload import Workload

INPUTS, OUTPUT = {128: 8.0, 1024: 4.0}, 64  # tokens of the prompts, with requests a second; tokens of the answers
SECONDS = 8.0  # of a round
EVEN = 1e6  # burstiness: all gaps are alike
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # what `vllm bench serve` does, which the build for CPUs does not start: it looks for a package of another name
NAMES = [
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for statistic in ("mean", "median")),
]


def ours(url: str, length: int, requests: int, rate: float) -> dict[str, Any]:
    work = Workload(num_prompts=requests, request_rate=rate, burstiness=EVEN, input_len=length, output_len=OUTPUT)
    return uvloop.run(run(LoadTest(url=url, workload=work))).as_json()


def vllm(url: str, length: int, requests: int, rate: float, seed: int) -> dict[str, Any]:
    """What it saves, without lists of nothing."""
    given = {
        "--backend": "openai", "--base-url": url, "--endpoint": "/v1/completions", "--model": BUNDLED.name,
        "--tokenizer": BUNDLED, "--dataset-name": "random", "--random-input-len": length, "--random-output-len": OUTPUT,
        "--num-prompts": requests, "--request-rate": rate, "--burstiness": EVEN, "--seed": seed, "--temperature": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el", "--result-filename": "vllm.json",
    }  # fmt: skip
    words = [str(word) for pair in given.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(interpreter("vllm", "native")),
            "-c",
            CLIENT,
            *words,
            "--ignore-eos",
            "--save-result",
            "--result-dir",
            folder,
        ]
        quiet = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run([*command, "--disable-tqdm"], capture_output=True, text=True, env=quiet)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        saved: dict[str, Any] = json.loads((Path(folder) / "vllm.json").read_text("utf-8"))
    return {name: value for name, value in saved.items() if not isinstance(value, list) and name != "tokenizer_id"}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab load_check", __doc__)
    p.add_argument("--rounds", type=at_least_one, default=3, help="of each (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    figures: dict[str, Any] = {}
    with Bench(str(BUNDLED), 1, 0, 64, 1).served() as url:
        for length, rate in INPUTS.items():
            rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "vllm": []}
            for number in range(options.rounds):
                rounds["ours"].append(ours(url, length, round(SECONDS * rate), rate))
                rounds["vllm"].append(vllm(url, length, round(SECONDS * rate), rate, number))
            compared = {name: [median(each[name] for each in reports) for reports in rounds.values()] for name in NAMES}
            rows = [(name, mine, theirs, 100 * (mine / theirs - 1)) for name, (mine, theirs) in compared.items()]
            console.print(f"prompts of {length} tokens, {rate:g} requests a second")
            console.print(table(("", "ours", "vLLM's", "difference, %"), rows, 2), "")
            medians = {name: {"ours": a, "vllm": b, "difference": a / b - 1} for name, (a, b) in compared.items()}
            figures[f"input_{length}"] = {"medians": medians, "rounds": rounds}
    finish(p, options, arguments, figures)
    return 0
