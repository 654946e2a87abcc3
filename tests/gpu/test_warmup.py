"""Warm-up: no step of a server requests a kernel that warm-up has not."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase6_integration.engine.warmup import attention_batches, sampling_batches, warmup_pages
from tests.phase1_kv_pool.support import needs_gpu

ROOT = Path(__file__).parents[2]

# Heads, KV heads, head_dim and page_size; all shapes have layers with a window. The second has as many KV heads as
# heads: up to 16 new tokens of a sequence then share a tile. The splits of the third are as long as they may be.
SHAPES = [(4, 2, 64, 16), (2, 2, 128, 64), (16, 2, 16, 16)]

UNLAUNCHED = """
from tests.gpu.unlaunched import requested  # first
import json, random, sys
from dataclasses import replace
import torch
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.loading.config import LayerConfig, ModelConfig
from phase2_prefill_decode.model import Model
from phase2_prefill_decode.model import sampler_for
from phase2_prefill_decode.step.runner import ModelRunner
from phase2_prefill_decode.backend import triton_backend
from phase6_integration.engine.warmup import long_step
from tests.gpu.test_warmup import serving, warming

parts, zeros = [], torch.Tensor.new_empty

def noted(self, *size, **kind):
    tensor = zeros(self, *size, **kind)
    if tensor.dim() == 4:  # the results of splits
        parts.append(tensor.nbytes)
    return tensor

torch.Tensor.new_empty = noted

def run(model, page_size, cache, batches, longest=0):
    pool = KVPool(model.config.kv_layout(page_size), cache.max_tokens // page_size, "cpu", torch.bfloat16)
    runner = ModelRunner(model.decoder, pool, cache, sampler_for(model, 0))
    for batch in batches:
        runner.launch(runner.pack(batch))
    if longest:
        step = long_step(runner.state, 7, model.config, longest)
        runner.compute(step, step.to(torch.device("cpu")))
    found = sorted(requested), max(parts)
    requested.clear()
    parts.clear()
    return found

for heads, kv_heads, head_dim, page_size in json.loads(sys.argv[1]):
    config = ModelConfig(
        vocab_size=64, num_hidden_layers=3, hidden_size=32, intermediate_size=32, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, qk_norm=True, max_position_embeddings=8192,
        layers=tuple(LayerConfig(window=window) for window in (None, 700, 20)), dtype="bfloat16",
    )
    packed = backend_for(torch.device("cpu")).linear
    model = Model.random(config, device="cpu", backend=replace(triton_backend(), linear=packed))
    print(json.dumps([run(model, page_size, *warming(page_size), 2560), run(model, page_size, *serving(page_size))]))
"""


def warming(page_size: int) -> tuple[PagedCache, Iterator[Batch]]:
    cache = PagedCache(warmup_pages(page_size), page_size)
    return cache, chain(attention_batches(cache, 8192), sampling_batches(cache))


def any_params(rng: random.Random) -> SamplingParams:
    """Any mixture of what a request may ask for."""
    asked = {
        "temperature": 0,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.2,
        "seed": 3,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {1: -5.0},
        "min_tokens": 2,
        "allowed_token_ids": (0, 1),
        "bad_words": ((1,), (0, 1)),
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    return SamplingParams(**{name: value for name, value in asked.items() if rng.random() < 0.25})


def serving(page_size: int) -> tuple[PagedCache, Iterator[Batch]]:
    """Steps of any mixture: decodes, drafts, chunks with and without context, prompts, all kinds of sampling."""
    cache, rng = PagedCache(1 + 9 * 2560 // page_size, page_size), random.Random(0)

    def batches() -> Iterator[Batch]:
        for _ in range(60):
            slices = []
            longest = rng.choice([1, 4, 8, 20, 400])
            for number in range(rng.choice([1, 2, 7])):
                new = rng.randint(1, longest)
                length = new + rng.choice([0, 1, 15, 300, 513, 2100])
                params = any_params(rng)
                request = Request(f"{number}", (0,) * (length + rng.choice([0, 0, 5])), params)
                cache.attach(request)
                cache.grow(request, length)
                slices.append(Slice(request, length - new, new))
            yield Batch(tuple(slices))
            for piece in slices:
                cache.release(piece.request)

    return cache, batches()


def test_serving_requests_no_kernel_that_warm_up_has_not_and_no_larger_results_of_splits() -> None:
    command = [sys.executable, "-c", UNLAUNCHED, json.dumps(SHAPES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for shape, line in zip(SHAPES, done.stdout.splitlines(), strict=True):
        (warmed, profiled), (served, parts) = json.loads(line)
        warmed, served = set(warmed), set(served)
        assert {kernel.split()[0] for kernel in served} >= {"decode_kernel", "join_kernel", "prefill_kernel"}, shape
        assert [kernel[:200] for kernel in sorted(served - warmed)] == [], shape
        assert parts <= profiled, f"{shape}: the results of splits take more memory than in the profile"


EXPERTS = """
from tests.gpu.unlaunched import requested  # first
import json
from dataclasses import replace
from types import SimpleNamespace
import torch
from phase2_prefill_decode.backend import triton_backend
from phase2_prefill_decode.extras.families import experts as families
from phase2_prefill_decode.extras.families.layer import Experts
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.triton_grouped import TritonGroups
from phase2_prefill_decode.extras.quantized.triton_product import TritonProduct, compile_products
from phase2_prefill_decode.linear import TorchLinear

families.grouped = lambda product, groups, device: TritonGroups(product, groups)
for scheme in (None, "int4", "int8", "fp8"):
    experts = Experts(number=6, top_k=2, inner=128, norm_topk=True)
    weights = {name: torch.zeros(sum(each.modules.values()), each.inputs, dtype=torch.bfloat16)
               for name, each in experts.tensors(128).items()}
    if scheme:
        weights |= {name: quantize(weights[name], scheme) for name in families.PRODUCTS}
    def linear(weight, bias):
        return TorchLinear(weight, bias) if isinstance(weight, torch.Tensor) else TritonProduct(weight, bias)
    layer = families.RoutedExperts(experts, weights, replace(triton_backend(), linear=linear))
    decoder = SimpleNamespace(layers=[SimpleNamespace(linears=[layer])], lm_head=layer._router)
    compile_products(decoder)
    warmed = sorted(requested)
    requested.clear()
    for tokens in (1, 3, 16, 40, 300):
        layer(torch.zeros(tokens, 128, dtype=torch.bfloat16))
    print(json.dumps([warmed, sorted(requested)]))
    requested.clear()
"""


def test_the_kernels_of_experts_are_compiled_with_the_model() -> None:
    command = [sys.executable, "-c", EXPERTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        warmed, served = ({kernel for kernel in kernels if "swiglu" not in kernel} for kernels in json.loads(line))
        assert {kernel.split()[0] for kernel in served} == {"grouped_kernel"}
        assert [kernel[:200] for kernel in sorted(served - warmed)] == []


COMPILED = """
import random
from triton import knobs
from phase6_integration.engine.engine import NanoServingEngine
from tests.gpu.test_warmup import any_params
compiled, rng = [], random.Random(1)
with NanoServingEngine.from_pretrained(kv_cache_pages=512, max_num_seqs=16, device="cuda") as engine:
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: compiled.append(fn.name)
    for number in range(40):
        engine.add_request([5] * (1 + 131 * number % 1500), any_params(rng))
        engine.step()
    while engine.has_work:
        engine.step()
print(compiled)
"""


@pytest.mark.gpu
@needs_gpu
def test_nothing_is_compiled_once_the_engine_is_ready() -> None:
    """Also not loaded from Triton's cache on disk: a kernel that is not in memory counts."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
