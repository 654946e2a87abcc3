"""`nanoserve bench compare`: this engine beside transformers, llama.cpp and vLLM, on a CPU.

Every engine is a process of its own, with the same weights, prompts and threads. They take turns, so that a slow
minute of the machine meets all of them. In its turn an engine runs a workload once to warm up and then some times more;
meanwhile the others are stopped. The median of all these runs counts. setup.sh installs llama.cpp and vLLM; an engine
without one is left out. The figures are saved after every row, and beside them what the engines said. A row that is
there with all engines is not measured again: a comparison can be cut off and continued.

`--against COMMIT` adds this engine as it was then: what a change did to the speed of this processor. Its figures name
the commit, and a row with figures of another commit is measured again.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TextIO

import torch
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.support import entry
from phase0_request.support.machine import describe
from phase6_integration.lab.peers.models import MODELS

HERE = Path(__file__).parent
BUILD = Path("build/peers")  # environments and models
PAGE_SIZE = 16
# What holds oneDNN, torch, MKL and numba to AVX2. llama.cpp is compiled for it.
AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma",
}  # fmt: skip
HELD_TO: dict[str, dict[str, str]] = {"native": {}, "avx2": AVX2}
RUNS = 2  # of a workload in an engine's turn, after one to warm up


class Workload(NamedTuple):
    """Concurrent requests with prompts and outputs of these lengths. One that is `cached` has the prompt of the round
    before, with a token more than a whole number of pages: only its decode counts."""

    requests: int
    prompt: int
    output: int
    cached: bool = False

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}"

    @property
    def tokens(self) -> int:
        """A KV cache holds so many."""
        return self.requests * (self.prompt + self.output)

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        rng = random.Random(f"{self.name} {not self.cached and seed}")  # no two workloads share a prefix
        return [[rng.randrange(10, vocabulary - 10) for _ in range(self.prompt)] for _ in range(self.requests)]

    def rate(self, seconds: float) -> float:
        """Tokens a second: of the answers, or of the prompts if the answers are of one token."""
        return self.requests * (self.output if self.output > 1 else self.prompt) / seconds


WARM_UP = Workload(1, 16, 4), Workload(4, 40, 4)
PROMPTS = Workload(4, 512, 1)
WORKLOADS = {
    "17m": (Workload(1, 16, 64), Workload(8, 128, 64), Workload(16, 128, 64), PROMPTS),
    "596m": (Workload(1, 16, 64), Workload(8, 128, 32), PROMPTS),
    **dict.fromkeys(("gemma3-270m", "lfm2-350m"), (Workload(1, 16, 64), Workload(8, 128, 64))),
}
LONG = Workload(1, 4097, 32, cached=True), Workload(1, 16_385, 32, cached=True)


def in_order(shape: str, rows: Mapping[str, Any]) -> list[str]:
    """The names of the workloads that were measured, in the order in which they are."""
    return [load.name for load in (*WORKLOADS[shape], *LONG) if load.name in rows]


class Peer(NamedTuple):
    """An engine with weights of a format: a directory in bfloat16, or a GGUF file. `tree`: where its source is, which
    is of `commit` if that is not the one that measures."""

    engine: str
    weights: str
    options: tuple[str, ...] = ()
    tree: str = entry.INSTALLATION
    commit: str | None = None

    @property
    def format(self) -> str:
        """Of the weights in memory, as the tables name it."""
        return self.options[0].partition("=")[2] if self.options else self.weights.replace("BF16", "bfloat16")


PEERS = {
    "ours": Peer("ours", "bfloat16"),
    "llama": Peer("llama", "BF16"),
    "vllm": Peer("vllm", "bfloat16"),
    "transformers": Peer("transformers", "bfloat16"),
    "ours_float32": Peer("ours", "bfloat16", ("dtype=float32",)),
    "ours_Q8_0": Peer("ours", "Q8_0"),
    "llama_Q8_0": Peer("llama", "Q8_0"),
    "ours_int8": Peer("ours", "bfloat16", ("quantization=int8",)),
    "ours_Q4_0": Peer("ours", "Q4_0"),
    "llama_Q4_0": Peer("llama", "Q4_0"),
    "ours_int4": Peer("ours", "bfloat16", ("quantization=int4",)),
    "ours_Q4_K_M": Peer("ours", "Q4_K_M"),
    "llama_Q4_K_M": Peer("llama", "Q4_K_M"),
}
BESIDE = {  # what the speed of each is divided by
    "ours": ("llama", "vllm", "transformers", "ours_float32"),
    "ours_int8": ("llama_Q8_0", "ours"),
    "ours_int4": ("llama_Q4_0", "ours"),
    "ours_Q4_K_M": ("llama_Q4_K_M", "ours"),
    "ours_Q8_0": ("llama_Q8_0", "ours"),
    "ours_Q4_0": ("llama_Q4_0", "ours"),
}
OF_LONG = "ours", "llama", "vllm"
ELSEWHERE = "llama", "vllm"  # engines with an environment of their own
RUN = {  # the module that runs an engine
    "ours": "phase6_integration.lab.peers.run_ours",
    "llama": "phase6_integration.lab.peers.run_llama",
    "vllm": "phase6_integration.lab.peers.run_vllm",
    "transformers": "phase6_integration.lab.peers.run_transformers",
}


def interpreter(engine: str, isa: str) -> Path:
    """The Python of an engine's environment."""
    name = "llama-avx2" if (engine, isa) == ("llama", "avx2") else engine
    return BUILD / name / "bin" / "python" if engine in ELSEWHERE else Path(sys.executable)


def available(name: str, isa: str) -> bool:
    """Whether there is the engine, and llama.cpp to quantize its weights."""
    engine, weights, *_ = PEERS[name]
    makers = [interpreter(engine, isa)] + [interpreter("llama", "native")] * (weights != "bfloat16")
    return all(maker.exists() for maker in makers)


def command(engine: str, isa: str, *arguments: object) -> list[str]:
    """The command that runs an engine."""
    return [str(interpreter(engine, isa)), "-m", RUN[engine], *map(str, arguments)]


def environment(isa: str, threads: int, tree: str = entry.INSTALLATION) -> dict[str, str]:
    """Of any engine. One with an environment of its own finds its script here, and none of our packages."""
    path = {"PYTHONPATH": tree, "PYTHONSAFEPATH": "1"}  # not the working directory
    return {**os.environ, **path, "OMP_NUM_THREADS": str(threads), **HELD_TO[isa]}


def add_before(commit: str) -> None:
    """Add the peers `before`: this engine as it was at a commit, in a folder of its own."""
    git = ["git", "-C", entry.INSTALLATION]
    found = subprocess.run([*git, "rev-parse", "--verify", f"{commit}^{{commit}}"], capture_output=True, text=True)
    if found.returncode:
        raise ValueError(f"--against {commit}: {found.stderr.strip()}")
    commit = found.stdout.strip()
    tree = BUILD / f"at-{commit}"
    if not tree.exists():
        part = tree.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        source = subprocess.run([*git, "archive", commit], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(part)], check=True, input=source)
        part.rename(tree)
    for name, peer in [(name, peer) for name, peer in PEERS.items() if peer.engine == "ours"]:
        before = name.replace("ours", "before")
        PEERS[before] = peer._replace(tree=str(tree.resolve()), commit=commit)
        BESIDE[name] = (*BESIDE.get(name, ()), before)


def weights(shape: str, kind: str) -> Path:
    """The model of this shape, which is made once: a directory, or a GGUF file of another type than bfloat16."""
    directory = BUILD / shape
    if not (directory / "config.json").exists():
        MODELS[shape].save(directory)
    file = directory / f"{kind}.gguf"
    if kind == "bfloat16" or file.exists():
        return directory if kind == "bfloat16" else file
    if kind == "BF16":
        from phase6_integration.lab.peers import to_gguf  # its package is not one that serving needs

        to_gguf.main(directory, str(file))
        return file
    quantize = command("llama", "native", "--quantize", weights(shape, "BF16"), file, kind)
    subprocess.run(quantize, check=True, stderr=subprocess.DEVNULL, env=environment("native", 1))
    return file


class Process(subprocess.Popen[str]):
    """An engine that answers, one workload at a time. What it says of each goes to a log."""

    def __init__(self, name: str, shape: str, isa: str, threads: int, tokens: int, log: TextIO) -> None:
        peer, self._vocabulary, self._log = PEERS[name], MODELS[shape].vocab_size, log
        self._words = f"{isa} {shape} {name}"
        self._errors = BUILD / f"{self._words.replace(' ', '_')}.stderr"
        model = weights(shape, peer.weights)
        with self._errors.open("w") as errors:
            super().__init__(
                command(peer.engine, isa, model, threads, tokens, *peer.options),
                env=environment(isa, threads, peer.tree), process_group=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def read(self, about: str) -> dict[str, Any]:
        """The next line of JSON."""
        assert self.stdout is not None
        line = next((line for line in self.stdout if line.startswith("{")), "")
        if not line:
            raise RuntimeError(f"{self._words} ended during {about}; {self._errors} says why")
        print(self._words, about, line, end="", file=self._log, flush=True)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, workload: Workload, seed: int) -> float:
        """The seconds of a workload."""
        asked = {"prompts": workload.prompts(self._vocabulary, seed), "output": workload.output}
        print(json.dumps(asked), file=self.stdin, flush=True)
        answer = self.read(workload.name)
        if answer["lengths"] != [workload.output] * workload.requests:
            raise RuntimeError(f"{self._words} did not answer {workload.name} in full: {answer['lengths']}")
        return float(answer["seconds"])

    def turn(self, workload: Workload, number: int) -> list[float]:
        """The seconds of each run in a turn. No run finds its prompts in a prefix cache, unless the workload is
        `cached`."""
        self.signal(signal.SIGCONT)
        seeds = range(number * (RUNS + 1), (number + 1) * (RUNS + 1))
        _, *seconds = [self.run(workload, seed) for seed in seeds]
        self.signal(signal.SIGSTOP)
        return seconds

    def signal(self, number: signal.Signals) -> None:
        """Signal the engine and the processes that it started."""
        os.killpg(self.pid, number)


def measure(
    names: Sequence[str], workloads: Sequence[Workload], start: Callable[[str], Process], rounds: int
) -> Iterator[tuple[Workload, dict[str, list[float]]]]:
    """The seconds of each workload, by engine. One after the other starts and is stopped; then they take turns."""
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for name in names:
            process = processes[name] = stack.enter_context(start(name))
            stack.callback(process.signal, signal.SIGCONT)  # it reads the end of its input
            process.read("start")
            for workload in WARM_UP:
                process.run(workload, 0)
            process.signal(signal.SIGSTOP)
        for workload in workloads:
            turns = product(range(1, rounds + 1), processes.items())
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for number, (name, process) in turns:
                seconds[name] += process.turn(workload, number)
            yield workload, seconds


def row(workload: Workload, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The figures of each engine: tokens a second, also as a multiple of others'."""
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        rates = [workload.rate(each) for each in times]
        figures[name] = {"median": median(rates), "least": min(rates), "most": max(rates), "runs": len(rates)}
        if (commit := PEERS[name].commit) is not None:
            figures[name]["commit"] = commit
    for name, beside in BESIDE.items():
        for other in beside if name in figures else ():
            if other in figures:
                figures[name][f"over_{other}"] = figures[name]["median"] / figures[other]["median"]
    return figures


def cells(peer: str, figures: Mapping[str, Any], against: bool) -> tuple[object, ...]:
    """The line of a peer in a table; `against`: with what it is over itself as it was before."""
    over = figures.get(f"over_{peer.replace('ours', 'before')}")
    shown = "" if over is None else f"{over:.2f}x"
    return peer, figures["median"], figures["least"], figures["most"], *([shown] if against else [])


def is_measured(names: Iterable[str], figures: Mapping[str, Any]) -> bool:
    """Whether a row has these engines, each as of its commit."""
    return all(name in figures and figures[name].get("commit") == PEERS[name].commit for name in names)


def selected(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def compare(shape: str, isa: str, options: argparse.Namespace, rows: dict[str, Any]) -> Iterator[str]:
    """Add the rows of a table, and yield the name of each. Those that are there already stay."""
    names = [name for name in selected(PEERS, options.peers) if available(name, isa)]
    for workloads, some in ((WORKLOADS[shape], names), (LONG, [name for name in names if name in OF_LONG])):
        wanted = [load for load in workloads if selected([load.name], options.workloads)]
        wanted = [load for load in wanted if not is_measured(some, rows.get(load.name, {}))]
        if not wanted or not some:
            continue
        tokens = max(load.tokens for load in wanted) + PAGE_SIZE
        with ExitStack() as stack:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(options.json.with_suffix(".txt").open("a", encoding="utf-8"))
            start = partial(Process, shape=shape, isa=isa, threads=options.threads, tokens=tokens, log=log)
            for load, seconds in measure(some, wanted, start, options.rounds):
                rows[load.name] = row(load, seconds)
                yield load.name


def main(arguments: list[str] | None = None, prog: str = "python -m phase6_integration.lab peers.compare") -> int:
    p = parser(prog, __doc__)
    p.prog = prog
    p.set_defaults(json=BUILD / "compare.json")
    p.add_argument("--shapes", nargs="+", choices=MODELS, default=["17m"], help=f"{', '.join(MODELS)} (17m)")
    p.add_argument("--held-to", nargs="+", choices=HELD_TO, default=["native"], help="native, or avx2 too (native)")
    p.add_argument("--peers", nargs="+", default=["*"], metavar="NAME", help=f"{', '.join(PEERS)}; * matches any (*)")
    p.add_argument("--workloads", nargs="+", default=["*"], metavar="NAME", help="such as 8x128+64 or 4x* (*)")
    p.add_argument("--rounds", type=at_least_one, default=3, help="of each workload (%(default)s)")
    p.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="of an engine (%(default)s)")
    p.add_argument("--against", metavar="COMMIT", help="add this engine as of a commit: the peers `before`")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.against:
        try:
            add_before(options.against)
        except ValueError as error:
            p.error(str(error))
    names = [load.name for load in (*chain(*(WORKLOADS[shape] for shape in options.shapes)), *LONG)]
    if not selected(PEERS, options.peers) or not selected(names, options.workloads):
        p.error(f"nothing to measure: --peers are of {', '.join(PEERS)}; --workloads of {', '.join(names)}")
    console.print(f"{describe().cpu}, {describe().vectors or 'no vectors'}, {options.threads} threads")
    for isa in options.held_to:
        if absent := [name for name in selected(PEERS, options.peers) if not available(name, isa)]:
            console.print(f"Left out: {', '.join(absent)}; bash {HERE / 'setup.sh'} installs llama.cpp and vLLM.")
    try:
        figures: dict[str, Any] = json.loads(options.json.read_text("utf-8"))["figures"]
    except FileNotFoundError:
        figures = {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        p.error(f"{options.json} has no figures to continue with ({error}): give another --json, or remove it")
    for isa, shape in product(options.held_to, options.shapes):
        rows = figures.setdefault(isa, {}).setdefault(shape, {})
        for name in compare(shape, isa, options, rows):
            console.print(f"\n{shape}, {name}, {isa}: tokens a second")
            names = ["", "median", "least", "most", *(["over before"] if options.against else [])]
            lines = [cells(peer, each, bool(options.against)) for peer, each in rows[name].items()]
            console.print(table(names, lines))
            finish(p, options, arguments, figures, console=Console(quiet=True))
    console.print(f"\nFigures: {options.json}. What the engines said: {options.json.with_suffix('.txt')}")
    return 0
