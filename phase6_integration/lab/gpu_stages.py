"""The stages of `gpu_day`: what is measured, in the order in which it is worth having. Each is a function of a Day.

It imports neither the HTTP server nor what that needs, for a machine with a GPU may have little installed.
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from phase0_request.machine import describe
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.lab.timing import clock_seconds, replay_seconds
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.fields import ConfigError
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import Device, predict
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.sampler import Sampler
from phase2_prefill_decode.weights import Weights, random_weights
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase5_continuous.lab.simulator import MODELS
from phase6_integration.engine import NanoServingEngine
from phase6_integration.options import EngineOptions

ROOT = Path(__file__).parents[2]
TINY = ModelConfig(
    model_type="qwen3", vocab_size=128, num_hidden_layers=2, hidden_size=32, intermediate_size=64,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, qk_norm=True, max_position_embeddings=256,
    dtype="float32",
)  # fmt: skip
WAYS: dict[str, dict[str, bool]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "graphs, one step ahead": {"enforce_eager": False, "async_scheduling": True},
}
TESTS = ("tests/gpu", "tests/phase1_kv_pool", "tests/phase2_prefill_decode", "tests/phase3_chunked_prefill")
TAIL = 4000  # characters of a test run's output


@dataclass(slots=True)
class Day:
    """What a stage needs: the device, and a file to which rows are appended at once, so that a cut loses none."""

    dry: bool
    file: TextIO

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def models(self) -> dict[str, ModelConfig]:
        return {"tiny": TINY} if self.dry else {"0.6b": SHAPES["596m"], "8b": MODELS["8b"]}

    def some(self, all: Sequence[Any], dry: Sequence[Any]) -> Sequence[Any]:
        return dry if self.dry else all

    def seconds(self, call: Callable[[], object], times: int = 10) -> float:
        """The seconds of a call on the device: on a GPU from a graph, without the host."""
        return clock_seconds([call]) if self.dry else replay_seconds([call] * times)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    @contextmanager
    def row(self, **found: Any) -> Iterator[dict[str, Any]]:
        """A row of the stage. What fails is a row too, and the stage goes on."""
        try:
            yield found
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:400]
        self.file.write(json.dumps(found, default=float) + "\n")
        self.file.flush()
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()


def smoke(day: Day) -> None:
    """One token of the bundled model, and the doctor's findings."""
    with (
        day.row(what="one token") as row,
        NanoServingEngine.from_pretrained(device=str(day.device), kv_cache_pages=64, max_num_seqs=2) as engine,
    ):
        (answer,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1), progress=False)
        row["token"] = answer.output_tokens[0]
    from phase6_integration.cli.doctor import findings

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
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            lines = done.stdout.splitlines()
            row |= {"last": lines[-1] if lines else "", "tail": (done.stdout + done.stderr)[-TAIL:]}
            if done.returncode not in (0, 5):  # 5: none was chosen
                raise RuntimeError(f"pytest ended with {done.returncode}")


def kernels(day: Day) -> None:
    """Ceilings of this device, then attention and sampling beside them."""
    with day.row(what="ceilings") as row:
        row |= limits(day)
    copy, product = row["copy_gb_per_second"], row["gflops_bfloat16"]
    for group in day.some((4, 8), (2,)):
        for page_size in (16, 64):
            for batch, length in day.some(((1, 32_768), (4, 16_384), (16, 4096), (64, 2048), (256, 2048)), ((2, 70),)):
                with day.row(what="decode", group=group, page_size=page_size, batch=batch, length=length) as row:
                    call, read, _ = attention(day, [(1, length)] * batch, page_size, group)
                    row["us"] = (seconds := day.seconds(call)) * 1e6
                    row |= {"gb_per_second": read / seconds / 1e9, "of_copy": read / seconds / 1e9 / copy}
            for new, length in day.some(((1024, 1024), (2048, 2048), (8192, 8192), (2048, 16_384)), ((40, 70),)):
                with day.row(what="prefill", group=group, page_size=page_size, new=new, length=length) as row:
                    call, _, operations = attention(day, [(new, length)], page_size, group)
                    row["us"] = (seconds := day.seconds(call, 3)) * 1e6
                    row["tflops"] = operations / seconds / 1e12
                    row["of_product"] = row["tflops"] * 1e3 / product
                    if new == length:
                        row["of_sdpa"] = day.seconds(sdpa(day, new, group), 3) / seconds
    for rows in day.some((1, 64, 256), (4,)):
        for name, asked in SAMPLED.items():
            with day.row(what="sample", rows=rows, how=name) as row, torch.inference_mode():
                vocabulary = day.some([151_936], [500])[0]
                sampler = Sampler((), vocabulary, day.device, 0)
                requests = [Request(f"{n}", (1,), SamplingParams(**asked)) for n in range(rows)]
                logits = torch.randn(rows, vocabulary, device=day.device).to(torch.bfloat16) * 3
                row["us"] = clock_seconds([partial(sampling(sampler, requests), logits)] * day.some([20], [1])[0]) * 1e6


def limits(day: Day) -> dict[str, float]:
    """What this device can do at best: bytes copied and read, and matrix products."""
    if day.dry:
        ceilings.SIZES, ceilings.OUT_OF_CACHE, ceilings.WIDTH = {"cpu": (16, 24, 32)}, {"cpu": 1 << 20}, 256
    best: dict[str, float] = ceilings.measure(day.device)["best"]
    return best


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 50, "top_p": 0.9},
}


def sampling(sampler: Sampler, requests: Sequence[Request]) -> Callable[[Tensor], object]:
    packed: Any = sampler.pack(requests)
    return lambda logits: sampler.sample(logits, packed)


def attention(
    day: Day, sizes: Sequence[tuple[int, int]], page_size: int, group: int
) -> tuple[Callable[[], Tensor], int, int]:
    """A call of one layer's attention over pages in random order; the bytes of keys and values that it reads, and its
    operations. `sizes` are (new, all) tokens of each sequence."""
    kv_heads, head_dim, dtype = (2, 16, torch.float32) if day.dry else (8, 128, torch.bfloat16)
    counts = [-(-length // page_size) for _, length in sizes]
    order = torch.randperm(sum(counts), dtype=torch.int32).split_with_sizes(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(day.device)
    starts = torch.tensor([0, *(new for new, _ in sizes)]).cumsum(0).int().to(day.device)
    lengths = torch.tensor([length for _, length in sizes], dtype=torch.int32, device=day.device)
    longest = [max(one) for one in zip(*sizes, strict=True)]
    metadata = AttentionMetadata(starts, lengths, table, longest[0], longest[1], tuple(sizes))
    shape = sum(counts), kv_heads, page_size, head_dim
    keys, values = (torch.randn(shape, device=day.device, dtype=dtype) for _ in "kv")
    tokens = sum(new for new, _ in sizes)
    query = torch.randn(tokens, kv_heads * group, head_dim, device=day.device, dtype=dtype)
    attend = ATTEND.on(day.device)
    read = sum(length for _, length in sizes) * kv_heads * head_dim * 2 * query.element_size()
    pairs = sum(new * (2 * length - new + 1) // 2 for new, length in sizes)
    return (
        lambda: attend(query, keys, values, metadata, head_dim**-0.5, None),
        read,
        4 * pairs * kv_heads * group * head_dim,
    )


def sdpa(day: Day, tokens: int, group: int) -> Callable[[], Tensor]:
    """torch's attention over the same heads, without pages."""
    kv_heads, head_dim, dtype = (2, 16, torch.float32) if day.dry else (8, 128, torch.bfloat16)
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, device=day.device, dtype=dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    call = torch.nn.functional.scaled_dot_product_attention
    return lambda: call(q, k, v, is_causal=True, enable_gqa=True)


class NotAvailableError(RuntimeError):
    """This engine lacks an option."""


@contextmanager
def opened(day: Day, config: ModelConfig, weights: Weights, **options: Any) -> Iterator[NanoServingEngine]:
    """An engine over weights that several share. Options that it lacks are refused by their names, unless they are to
    be off."""
    lacks = options.keys() - {one.name for one in fields(EngineOptions)}
    if any(options[name] for name in lacks):
        raise NotAvailableError(f"not available: {', '.join(sorted(lacks))}")
    options = {name: value for name, value in options.items() if name not in lacks}
    small = {"kv_cache_pages": 64, "max_num_seqs": 4, "threads": 1} if day.dry else {"max_num_batched_tokens": 8192}
    try:
        engine = NanoServingEngine(config, weights, enable_prefix_caching=False, **{**small, **options})
    except ConfigError as error:
        raise NotAvailableError(f"not available: {error}") from error
    with engine:
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
    from vllm import LLM  # type: ignore[import-not-found]
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
