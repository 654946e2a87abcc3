"""The stages of `gpu_day`: what is measured, in the order in which it is worth having. Each is a function of a Day.

It imports neither the HTTP server nor what that needs, for a machine with a GPU may have little installed.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from phase0_request.machine import describe
from phase0_request.params import SamplingParams
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import Device, predict
from phase2_prefill_decode.weights import Weights, random_weights
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.lab.gpu_kernels import kernels
from phase6_integration.lab.gpu_rows import SAMPLED, Day, limits

ROOT = Path(__file__).parents[2]
WAYS: dict[str, dict[str, bool]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "graphs, one step ahead": {"enforce_eager": False, "async_scheduling": True},
}
TESTS = ("tests/gpu", "tests/phase1_kv_pool", "tests/phase2_prefill_decode", "tests/phase3_chunked_prefill")
TAIL = 4000  # characters of a test run's output


def smoke(day: Day) -> None:
    """One token of the bundled model, and the doctor's findings."""
    with (
        day.row(what="one token") as row,
        NanoServingEngine.from_pretrained(device=str(day.device), kv_cache_pages=64, max_num_seqs=2) as engine,
    ):
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1), progress=False)
        row["token"] = answer.output_tokens[0]
    from phase6_integration.engine.machine_checks import findings

    for finding in findings(describe()):
        with day.row(what=finding.name, state=finding.state.value, words=finding.words, advice=finding.advice) as row:
            if finding.state.value == "fault":
                raise RuntimeError(finding.words)


def tests(day: Day) -> None:
    """The tests that need a GPU, then those of the Triton kernels, which run on it where there is one."""
    marks = {"gpu": ["-m", "gpu"], "triton": ["-m", "not gpu and not slow", "-k", "triton"]}
    for name, chosen in marks.items():
        with day.row(what=name) as row:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *chosen]
            command += day.some(TESTS, ("tests/gpu/test_warmup.py",))
            if find_spec("llguidance") is None:  # only grammars need it
                command += ["--ignore", "tests/phase2_prefill_decode/test_constraints.py"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            lines = done.stdout.splitlines()
            row |= {"last": lines[-1] if lines else "", "tail": (done.stdout + done.stderr)[-TAIL:]}
            if done.returncode not in (0, 5):  # 5: none was chosen
                raise RuntimeError(f"pytest ended with {done.returncode}")


@contextmanager
def opened(day: Day, config: ModelConfig, weights: Weights, **options: Any) -> Iterator[NanoServingEngine]:
    """An engine over weights that several share."""
    small = {"kv_cache_pages": 64, "max_num_seqs": 4, "threads": 1} if day.dry else {"max_num_batched_tokens": 8192}
    with NanoServingEngine(config, weights, enable_prefix_caching=False, **{**small, **options}) as engine:
        yield engine


def random_prompts(config: ModelConfig, batch: int, context: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(3, config.vocab_size, (batch, context), generator=draw).tolist()
    return prompts


def fill(engine: NanoServingEngine, batch: int, context: int, answer: int, **params: Any) -> None:
    """Queue requests of random tokens."""
    for prompt in random_prompts(engine.parts.model.config, batch, context):
        engine.add_request(prompt, SamplingParams(max_tokens=answer, ignore_eos=True, **{"temperature": 0, **params}))


def decoding(day: Day, engine: NanoServingEngine, batch: int, context: int, steps: int) -> None:
    """Step until all requests of a batch decode, and will for so many steps."""
    prefills = batch * context // day.some([4096], [256])[0] + 8
    fill(engine, batch, context, prefills + steps)
    for _ in range(2 * prefills):
        step = engine.step()
        if step is not None and step.decode_tokens == batch:
            return
    raise RuntimeError(f"{batch} requests do not decode together: the pool is too small")


def each_way(day: Day, measure: Callable[[NanoServingEngine, dict[str, Any]], None]) -> None:
    """Measure an engine of every model in every way. The figures go to a row."""
    for model, config in day.models.items():
        weights = random_weights(config, day.device)
        for way, options in WAYS.items():
            with day.row(model=model, way=way) as row:
                start = time.perf_counter()
                with opened(day, config, weights, **options) as engine:
                    row["ready_seconds"] = time.perf_counter() - start
                    measure(engine, row)


def step(day: Day) -> None:
    """Decode steps beside the roofline of what was measured here: as fast as memory is read and matrices multiply."""
    best = limits(day)
    bandwidth = max(best["copy_gb_per_second"], best["read_gb_per_second"])
    limit = Device("measured", best["gflops_bfloat16"] * 1e9, bandwidth * 1e9)
    steps, context = day.some((50, 1024), (3, 20))

    def measure(engine: NanoServingEngine, row: dict[str, Any]) -> None:
        cost = CostModel(engine.parts.model.config, dtype=str(engine.parts.model.decoder.dtype).removeprefix("torch."))
        for batch in day.some((1, 8, 64, 256), (1, 2)):
            decoding(day, engine, batch, context, steps)
            day.wait()
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            day.wait()
            seconds = (time.perf_counter() - start) / steps
            least = predict(cost.pieces([(context + steps // 2, 1)] * batch), limit).seconds
            row[f"batch_{batch}"] = {"ms": seconds * 1e3, "roofline_ms": least * 1e3, "of_roofline": least / seconds}
            abort(engine)

    each_way(day, measure)


def idle(day: Day) -> None:
    """The share of the time in which no kernel runs, over steady decode steps."""
    activity = torch.profiler.ProfilerActivity
    steps, context = day.some((200, 1024), (3, 20))

    def measure(engine: NanoServingEngine, row: dict[str, Any]) -> None:
        for batch in day.some((64, 256), (2,)):
            decoding(day, engine, batch, context, steps)
            with torch.profiler.profile(activities=[activity.CPU if day.dry else activity.CUDA]) as profile:
                for _ in range(steps):
                    engine.step()
                day.wait()
            events = (event.time_range for event in profile.events() or ())
            row[f"batch_{batch}"] = {"idle_share": idle_share((one.start, one.end) for one in events)}
            abort(engine)

    each_way(day, measure)


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """1 - the union of the intervals / the time from the first to the last."""
    ordered = sorted(intervals)
    busy, end = 0.0, ordered[0][0]
    for start, stop in ordered:
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return 1 - busy / (end - ordered[0][0])


def abort(engine: NanoServingEngine) -> None:
    for sequence in list(engine.parts.scheduler.sequences):
        engine.abort(sequence.request)
    finish(engine)


def finish(engine: NanoServingEngine) -> None:
    while engine.has_work:
        engine.step()


def serve(day: Day) -> None:
    """256 requests of 1,024 tokens, each with an answer of 1,024, from the first step to the last."""
    batch, context, answer = day.some((256, 1024, 1024), (3, 20, 4))

    def measure(engine: NanoServingEngine, row: dict[str, Any]) -> None:
        for name in ("greedy", "top_p"):
            fill(engine, batch, context, 4, **SAMPLED[name])
            finish(engine)
            fill(engine, batch, context, answer, **SAMPLED[name])
            start = time.perf_counter()
            finish(engine)
            seconds = time.perf_counter() - start
            row[name] = {"seconds": seconds, "tokens_per_second": batch * answer / seconds}

    each_way(day, measure)


def beside(day: Day) -> None:
    """transformers' continuous batching and this engine in one process, on one workload, one after the other."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from phase2_prefill_decode.lab.bench import random_peer

    make: Any = GenerationConfig
    batch, context, answer = day.some((64, 1024, 256), (2, 8, 3))
    small: Any = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64) if day.dry else None
    for model, config in day.models.items():
        prompts, labels = random_prompts(config, batch, context), {"model": model, "requests": batch, "answer": answer}
        with (
            day.row(engine="nano-serving", **labels) as row,
            opened(day, config, random_weights(config, day.device)) as engine,
        ):
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            engine.generate(prompts[:2], replace(params, max_tokens=2), progress=False)
            start = time.perf_counter()
            engine.generate(prompts, params, progress=False)
            row["tokens_per_second"] = batch * answer / (time.perf_counter() - start)
        with day.row(engine="transformers", **labels) as row:
            with day.device:
                peer = random_peer(config, getattr(torch, config.dtype))
            for tokens, some in ((2, prompts[:2]), (answer, prompts)):  # the first warms up
                how = make(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
                start = time.perf_counter()
                found = peer.generate_batch(some, how, continuous_batching_config=small)
                row["tokens"] = sum(len(one.generated_tokens) for one in found.values())
                row["tokens_per_second"] = row["tokens"] / (time.perf_counter() - start)


def vllm(day: Day) -> None:
    """vLLM on the workload of `serve`, with random weights of the same shapes."""
    from vllm import LLM
    from vllm import SamplingParams as Params

    from phase2_prefill_decode.lab.bench import peer_config

    for model, config in day.models.items():
        with day.row(model=model, engine="vLLM") as row, tempfile.TemporaryDirectory() as folder:
            peer_config(config).save_pretrained(folder)
            engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype=config.dtype, max_model_len=4096)
            prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(config, 256, 1024)]
            start = time.perf_counter()
            engine.generate(prompts, Params(temperature=0, max_tokens=1024, ignore_eos=True, detokenize=False))
            row["tokens_per_second"] = 256 * 1024 / (time.perf_counter() - start)


STAGES: dict[str, Callable[[Day], None]] = {
    one.__name__: one for one in (smoke, tests, kernels, step, idle, serve, beside, vllm)
}
