"""`nanoserve bench serve` beside GuideLLM on one server: do two load generators measure the same?

Both send requests of one length at one even rate, and take turns; the median of the rounds counts. GuideLLM is in an
environment of its own, which `--guidellm` names. What it calls inter-token latency is TPOT in vLLM's names and here: the
time from the first to the last delivery over one token less than there are. Its own TPOT counts the first token too.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.tokenizer import BUNDLED
from phase6_integration.lab.bench import Bench
from phase6_integration.load.client import LoadTest, run
from phase6_integration.load.workload import Workload

INPUT, OUTPUT = 128, 64  # tokens of each request
EVEN = 1e6  # burstiness: all gaps are alike
NAMES = {  # ours, and where GuideLLM's report has it
    "request_throughput": ("requests_per_second", "mean"),
    "output_throughput": ("output_tokens_per_second", "mean"),
    "mean_ttft_ms": ("time_to_first_token_ms", "mean"),
    "median_ttft_ms": ("time_to_first_token_ms", "median"),
    "mean_tpot_ms": ("inter_token_latency_ms", "mean"),
    "median_tpot_ms": ("inter_token_latency_ms", "median"),
}


def ours(url: str, requests: int, rate: float) -> dict[str, Any]:
    work = Workload(num_prompts=requests, request_rate=rate, burstiness=EVEN, input_len=INPUT, output_len=OUTPUT)
    return uvloop.run(run(LoadTest(url=url, workload=work))).as_json()


def guidellm(program: str, url: str, requests: int, rate: float, file: Path) -> dict[str, Any]:
    """The metrics of its report. Its requests, with their texts, are not kept."""
    given = {
        "--backend": f"kind=openai_http,target={url},model={BUNDLED.name},request_format=/v1/completions",
        "--profile": f"kind=constant,rate={rate}",
        "--constraint": f"kind=max_requests,count={requests}",
        "--tokenizer": f"kind=hf_auto,model={BUNDLED}",
        "--data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
        "--output": f"kind=json,path={file}",
    }
    command = [program, "run", *(word for pair in given.items() for word in pair), "--disable-console"]
    subprocess.run(command, check=True, capture_output=True)
    metrics = json.loads(file.read_text("utf-8"))["benchmarks"][0]["metrics"]
    file.unlink()
    whole = {name: metric["successful"] for name, metric in metrics.items() if "successful" in (metric or {})}
    return {
        name: {q: v for q, v in each.items() if q != "pdf"} for name, each in whole.items() if isinstance(each, dict)
    }


def compared(rounds: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """The median of each figure, and how far ours is from the other's."""
    figures = {}
    for name, (theirs, statistic) in NAMES.items():
        mine = median(report[name] for report in rounds["ours"])
        other = median(report[theirs][statistic] for report in rounds["guidellm"])
        figures[name] = {"ours": mine, "guidellm": other, "difference": mine / other - 1}
    return figures


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab load_check", __doc__)
    p.add_argument("--guidellm", required=True, metavar="PROGRAM", help="its command, such as ENVIRONMENT/bin/guidellm")
    p.add_argument("--requests", type=at_least_one, default=96, help="of a round (%(default)s)")
    p.add_argument("--rate", type=float, default=8.0, help="requests a second (%(default)s)")
    p.add_argument("--rounds", type=at_least_one, default=3, help="of each (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "guidellm": []}
    with Bench(str(BUNDLED), 1, options.requests, 64, 1).served() as url:
        for number in range(options.rounds):
            rounds["ours"].append(ours(url, options.requests, options.rate))
            file = Path(f"guidellm_{number}.json").resolve()
            rounds["guidellm"].append(guidellm(options.guidellm, url, options.requests, options.rate, file))
    figures = compared(rounds)
    rows = [(name, each["ours"], each["guidellm"], 100 * each["difference"]) for name, each in figures.items()]
    console.print(table(("", "ours", "GuideLLM", "difference, %"), rows, 2))
    finish(p, options, arguments, {"compared": figures, "rounds": rounds})
    return 0
