"""A model over several ranks: what each holds, and the tokens of all together."""

import os
import socket
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import check_split, runner_for
from phase2_prefill_decode.engine import Engine, static
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.extras.parallel import worker
from phase2_prefill_decode.extras.parallel.ranks import RankError, Ranks
from phase2_prefill_decode.extras.parallel.shard import Shard, ShardedCheckpoint
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.extras.quantized.layout import SCHEMES
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.model import Model, sampler_for
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase6_integration.support.machine_checks import ANSWER, QUESTION
from tests.phase2_prefill_decode.models import FAMILIES, VARIANTS, saved, variant
from tests.phase2_prefill_decode.ranks_in_threads import split
from tests.phase2_prefill_decode.test_identity import follows, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FEW = *FAMILIES, "qwen3-tied", "llama-one-kv-head", "llama-biases"


def slow(name: str, ranks: int) -> Any:
    return pytest.param(name, ranks, marks=pytest.mark.slow)


def tensors_of(directory: Path, config: ModelConfig, rank: int, size: int) -> dict[str, Tensor]:
    checkpoint = Checkpoint(directory)
    part = ShardedCheckpoint(checkpoint, Shard(config, rank, size))
    found = {name: torch.cat([*map(torch.as_tensor, part.chunks(name))]) for name in part.stored}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {n: s.shape for n, s in part.stored.items()}
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "llama-one-kv-head", "llama-no-gqa"])
def test_the_parts_of_all_ranks_are_the_checkpoint(name: str, size: int, tmp_path: Path) -> None:
    """Side by side: rows of what a rank computes alone, columns of what is summed, and the same norms on each."""
    oracle = variant(name)
    directory = saved(oracle, tmp_path)
    config, whole = ModelConfig.from_pretrained(directory), load_file(directory / "model.safetensors")
    parts = [tensors_of(directory, config, rank, size) for rank in range(size)]
    for tensor_name, tensor in whole.items():
        each = [part[tensor_name] for part in parts]
        module, kind = tensor_name.split(".")[-2:]
        held = f"{tensor_name} {list(tensor.shape)}; the ranks hold {[list(part.shape) for part in each]}"
        if module in ("o_proj", "down_proj") and kind == "weight":
            assert torch.equal(torch.cat(each, 1), tensor), f"columns side by side are not {held}"
        elif module in ("k_proj", "v_proj"):  # several ranks may hold one head
            copies = max(size // config.num_key_value_heads, 1)
            shared = all(torch.equal(each[rank], each[rank - rank % copies]) for rank in range(size))
            assert shared, f"{copies} ranks share each head of {held}"
            assert torch.equal(torch.cat(each[::copies]), tensor), f"one rank of each head together is not {held}"
        elif "norm" in module or (kind == "bias" and module in ("o_proj", "down_proj")):
            assert all(torch.equal(part, tensor) for part in each), f"each rank has all of {held}"
        else:
            assert torch.equal(torch.cat(each), tensor), f"rows one after the other are not {held}"
            assert max(map(len, each)) - min(map(len, each)) <= 1, f"the shares are uneven: {held}"


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks) if (ranks == 2 and name in FEW) or name == "qwen3-one-kv-head" else slow(name, ranks)
        for name in VARIANTS
        for ranks in (2, 4)
    ],
)
def test_greedy_has_the_tokens_of_one_rank_and_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    oracle = variant(name)
    directory = saved(oracle, tmp_path)
    given = prompts(oracle.config.vocab_size)
    alone = static(Model.load(directory, device="cpu", dtype="float32")).generate(given, GREEDY)
    with split(directory, ranks) as model:
        answers = static(model).generate(given, GREEDY)
    for prompt, answer, other in zip(given, answers, alone, strict=True):
        assert follows(oracle, prompt, answer.output_tokens)
        assert answer.output_tokens == other.output_tokens


def test_all_that_an_engine_does_it_does_with_two_ranks(tmp_path: Path) -> None:
    """Shared prefixes, preemption, chunks, steps ahead, drafts, penalties, seeds and log-probabilities, at once. A
    draft model is not split: it runs on rank 0."""
    directory = saved(variant("qwen3-biases"), tmp_path)
    prefix, *given = prompts(300, [37, 1, 9, 40, 64, 90, 17])
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, repetition_penalty=1.3, logit_bias={5: 2.0}),
        SamplingParams(temperature=1, seed=3, max_tokens=15, ignore_eos=True, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=(7, 8, 9, 10)),
    ]

    def answers(model: Model) -> list[Any]:
        found: list[Any] = []
        drafts = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 3}
        for ahead, speculation in ((0, None), (1, None), (0, drafts)):
            cache, budget = PrefixCache(24, 8), TokenBudget(16, 48)
            how = {"cache": cache, "ahead": ahead, "speculative_config": speculation, "max_running": 4, "seed": 0}
            engine = continuous(model, budget, **how)
            for _ in range(2):  # the second time the prompts are cached
                found += engine.generate([prefix + prompt for prompt in given], params)
            assert engine.core.scheduler.running_set.num_preemptions > 0
        return found

    alone = answers(Model.load(directory, device="cpu", dtype="float32"))
    with split(directory, 2) as model:
        together = answers(model)
    for one, other in zip(alone, together, strict=True):
        assert one.output_tokens == other.output_tokens
        for ours, theirs in zip(one.more, other.more, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        scores = [[token.logprob for token in extras_of(made.request).prompt_logprobs] for made in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize(
    ("ranks", "config", "said"),
    [
        (3, {}, "tensor_parallel_size must divide the model's num_attention_heads, 4; got 3"),
        (4, {"intermediate_size": 90}, "tensor_parallel_size must divide the model's intermediate_size, 90; got 4"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
            "tensor_parallel_size must divide the model's num_key_value_heads, 3, or be a multiple of it; got 2",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(ranks: int, config: dict[str, int], said: str) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_size": 64,
    } | config
    with pytest.raises(ConfigError, match=said):
        check_split(ModelConfig(**sizes), ranks)


@pytest.mark.parametrize("kind", [*SCHEMES, "zeros", "offsets"])
def test_a_part_of_a_quantized_weight_is_that_part_of_its_numbers(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(24, 128, generator=draw), kind if kind in SCHEMES else "int4")
    groups = torch.randint(0, 16, weight.scales.shape, generator=draw).to(weight.scales.dtype)
    weight = replace(weight, **{kind: groups} if kind not in SCHEMES else {})
    whole = weight.dequantize()
    for rows, columns in ((slice(8, 16), slice(None)), (slice(None), slice(64, 128)), (slice(3, 9), slice(0, 64))):
        assert torch.equal(weight.part(rows, columns).dequantize(), whole[rows, columns])
    if weight.group < 128:
        with pytest.raises(ValueError, match=f"columns 0 to 2 cut a group of {weight.group}"):
            weight.part(slice(None), slice(0, 2))
    with pytest.raises(ValueError, match="its inputs have an order of their own"):
        replace(weight, order=torch.randperm(128)).part(slice(None), slice(0, 64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_that_are_quantized_when_they_are_loaded_are_split(scheme: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    with split(BUNDLED, 2, transform=Quantization(scheme)) as model:
        assert model.tokenizer is not None
        prompt = model.tokenizer.chat([{"role": "user", "content": QUESTION}])
        (answer,) = static(model).generate([prompt], params)
    assert answer.text == ANSWER


def test_recorded_steps_run_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded here is a function that computes the step again: CUDA graphs need several GPUs."""
    monkeypatch.setattr("phase2_prefill_decode.step.runner.cuda_record", lambda: replays_itself)
    oracle = variant("qwen3")
    with split(saved(oracle, tmp_path), 2) as model:
        cache = PagedCache(32, 16)
        scheduler = StaticScheduler(cache, model.eos_ids, batch_size=4)
        runner = runner_for(model.decoder, cache, sampler_for(model, 0), None, (8, 8))
        runner.record([1, 2, 4], 128, replays_itself)
        given = prompts(300, [3, 17, 30])
        answers = Engine(model, EngineCore(scheduler, runner)).generate(given, GREEDY)
    assert all(follows(oracle, p, answer.output_tokens) for p, answer in zip(given, answers, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's packet filter is Linux's")
def test_nobody_else_reaches_a_rank_once_all_are_connected(tmp_path: Path) -> None:
    """Gloo keeps its listeners, and ends the process if more connect than it has descriptors for."""
    before = listening_ports()
    with split(saved(variant("qwen3"), tmp_path), 2) as model:
        ports = listening_ports() - before
        assert len(ports) == 2
        for port in ports:
            with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
                pass
        assert static(model).generate(prompts(300, [9]), GREEDY)


def listening_ports() -> set[int]:
    """Of this process, as the kernel lists them."""
    own = {place.resolve().name for place in Path("/proc/self/fd").iterdir()}  # socket:[number]
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_engines_that_share_a_model_do_not_read_each_others_keys(tmp_path: Path) -> None:
    """Of several ranks: the others have one KV pool. The engine made last has it."""
    with split(saved(variant("qwen3"), tmp_path), 2) as model:
        one, other = static(model), static(model)
        with pytest.raises(RuntimeError, match="another engine of this model has its keys and values"):
            one.generate(prompts(300, [9]), GREEDY)
        assert other.generate(prompts(300, [9]), GREEDY)


def test_a_pool_that_another_rank_has_no_memory_for_is_refused_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "KVPool", Mock(side_effect=ValueError("9 pages need 7 GiB")))
    said = "rank 1 of 2 has failed: 9 pages need 7 GiB"
    with split(saved(variant("qwen3"), tmp_path), 2) as model, pytest.raises(RankError, match=said):
        static(model)


def replays_itself(run: Any) -> Any:
    run()
    return run


class Idle(Ranks):
    """Ranks of which nobody listens."""

    def _start(self, rank: int, theirs: Connection) -> None:
        self.theirs = Connection(os.dup(theirs.fileno()))


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (MemoryError(), RankError, "rank 0 of 2 has left a step .* Memory"),
    ],
)
def test_after_a_step_that_ended_early_on_rank_0_none_is_sent(
    error: BaseException, raised: type[BaseException], said: str | None
) -> None:
    """The other ranks are in the middle of it: another one would meet them there, and wait."""
    ranks = Idle(2)
    with ranks.theirs, pytest.raises(raised, match=said), ranks.together():
        raise error
    with pytest.raises(RankError, match=f"rank 0 of 2 has left a step in the middle: {type(error).__name__}"):
        ranks.tell("free_bytes")
