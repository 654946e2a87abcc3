"""Models in which layers keep a state of each request in place of pages have transformers' tokens, whatever happens to
their requests."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import conv1d, pad
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.connect import check_split, config_of, runner_for
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.extras.families.delta_rule import Tokens, delta_rule
from phase2_prefill_decode.extras.families.recurrent import causal_conv
from phase2_prefill_decode.extras.families.states import LayerState, StatefulRunner
from phase2_prefill_decode.model import Model, sampler_for
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase6_integration.engine import sizing
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.isolation import IsolatingCore, IsolatingRunner, LoadShedding
from phase6_integration.engine.runners import Computing
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.steps import NothingWaits, loaded
from tests.phase2_prefill_decode.test_identity import follows, prompts

ANSWER = 24
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-biases": (
        "lfm2",
        {
            "full_attn_idxs": [2, 4], "num_hidden_layers": 5, "num_key_value_heads": 1, "conv_bias": True,
            "conv_L_cache": 4, "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-without-attention": (  # transformers' own cache serves none of them
        "lfm2", {"layer_types": ["conv", "conv", "conv"], "conv_L_cache": 2, "use_cache": False}
    ),
    "qwen3.5-without-attention": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "linear_attention"], "num_hidden_layers": 2, "head_dim": 16,
            "use_cache": False, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 5, "full_attention_interval": 4, "head_dim": 24, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]
            },
        },
    ),
    "qwen3.5-experts": (
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_experts": 9, "num_experts_per_tok": 3,
            "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_experts": 8, "num_experts_per_tok": 4,
            "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24, "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5-whole-rotation": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention", "linear_attention", "full_attention"], "head_dim": 16,
            "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16, "linear_conv_kernel_dim": 2, "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]
            },
        },
    ),
}  # fmt: skip
ALIKE = (33, 2, 7, 18, 30)  # a prefix, and what follows it in each prompt


@pytest.fixture(params=VARIANTS, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model, Path]:
    """A model of transformers, the same one here, and where it is saved."""
    family, options = VARIANTS[request.param]
    oracle = tiny_model(family, **options)
    directory = saved(oracle, tmp_path_factory.mktemp(request.param))
    return oracle, Model.load(directory, device="cpu", dtype="float32"), directory


Pair = tuple[Any, Model, Path]


def alike(model: Model) -> list[list[int]]:
    prefix, *rest = prompts(model.config.vocab_size, ALIKE)
    return [prefix + end for end in rest]


def runner_of(engine: Any) -> StatefulRunner:
    runner = engine.core.runner
    assert isinstance(runner, StatefulRunner)
    return runner


def test_it_has_the_tokens_and_the_logits_of_transformers(pair: Pair) -> None:
    oracle, model, directory = pair
    given = prompts(model.config.vocab_size)
    for prompt, answer in zip(given, static(model).generate(given, GREEDY), strict=True):
        assert len(answer.output_tokens) == ANSWER
        assert follows(oracle, prompt, answer.output_tokens)
    (prompt,) = prompts(model.config.vocab_size, [81])
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
        coarse = deepcopy(oracle).to(torch.bfloat16)
        theirs_in_bf16 = coarse(torch.tensor([prompt])).logits[0].float()
        rounded = coarse.float()(torch.tensor([prompt])).logits[0]  # the same weights, without further rounding
    for cuts in ([81], [70, *[1] * 11]):  # at once, and the last tokens one at a time
        found = logits(model, prompt, cuts)
        assert (found - wanted[-len(found) :]).abs().max() < 1e-4 * max(1, float(wanted.abs().max()))
    found = logits(Model.load(directory, device="cpu", dtype="bfloat16"), prompt, [1] * 81).float()
    assert (found - rounded).norm() < 1.5 * (theirs_in_bf16 - rounded).norm(), "within the noise of the family"


def logits(model: Model, prompt: list[int], cuts: list[int]) -> Tensor:
    """The logits after each slice of a prompt."""
    cache = PagedCache(64, 4)
    runner = runner_of(static(model, cache=cache))
    request = Request("r", tuple(prompt))
    cache.attach(request)
    rows, start = [], 0
    for length in cuts:
        known = Request("r", tuple(prompt[: start + length]))
        cache.grow(known, start + length)
        rows.append(runner.forward(runner.pack(Batch((Slice(known, start, length),)))).logits)
        start += length
    return torch.cat(rows)


@pytest.mark.parametrize("ahead", [0, 1])
def test_chunks_and_preemption_do_not_change_its_tokens(pair: Pair, ahead: int) -> None:
    """A pool that is too small for all requests, and chunks of 7 tokens."""
    oracle, model, _ = pair
    engine = continuous(model, TokenBudget(7), cache=PagedCache(16, 8), ahead=ahead)
    given = alike(model)
    for prompt, answer in zip(given, engine.generate(given, GREEDY), strict=True):
        assert len(answer.output_tokens) == ANSWER
        assert follows(oracle, prompt, answer.output_tokens)
    assert engine.core.scheduler.running_set.num_preemptions


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-experts", "qwen3-next"])
def test_the_rotated_part_of_a_head_may_stand_at_the_top_of_the_config(name: str, tmp_path: Path) -> None:
    """As older checkpoints have it. In both places, the one beside the base counts."""
    family, options = VARIANTS[name]
    oracle = tiny_model(family, **options)
    file = saved(oracle, tmp_path) / "config.json"
    config = json.loads(file.read_text())
    share = config["rope_parameters"].pop("partial_rotary_factor")
    assert share == 0.5
    file.write_text(json.dumps(config | {"partial_rotary_factor": share}))
    prompt = prompts(oracle.config.vocab_size)[0]
    (answer,) = continuous(Model.load(tmp_path, device="cpu", dtype="float32"), cache=PagedCache(64, 8)).generate(
        [prompt], GREEDY
    )
    assert follows(oracle, prompt, list(answer.output_tokens))


def poison(runner: StatefulRunner) -> None:
    """Fill the states of all rows that no open request has with NaN."""
    used = {*runner.cache._rows.values()}
    for layer in runner.states:
        for tensor in layer.tensors:
            for row in set(range(len(tensor))) - used:
                tensor[row] = torch.nan


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_never_reads_the_state_of_another(pair: Pair, ahead: int) -> None:
    """Requests come and go, some are aborted in the middle, some are preempted; rows that nobody has are poisoned."""
    oracle, model, _ = pair
    engine = continuous(model, TokenBudget(9), cache=PagedCache(20, 8), ahead=ahead, max_running=3)
    core, runner = engine.core, runner_of(engine)
    requests = [Request(f"{n}", tuple(prompt), GREEDY) for n, prompt in enumerate(prompts(307, (5, 40, 1, 17, 30, 9)))]
    aborted = {"1": 5, "3": 11}
    for request in requests:
        core.submit(request)
    for step in range(1000):
        poison(runner)
        for name in [name for name, when in aborted.items() if when == step]:
            core.abort(requests[int(name)])
        if core.step() is None and not core.has_work:
            break
    for request in requests:
        if request.id not in aborted:
            assert len(request.output_tokens) == ANSWER
            assert follows(oracle, list(request.prompt_tokens), list(request.output_tokens))


@pytest.mark.parametrize("stage", ["before", "within", "after"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failed_step_is_repeated_from_the_right_states(
    pair: Pair, stage: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seventh step of several requests fails: before the model runs, between two layers, or when its tokens are
    read. The engine runs its slices one by one; over pages, computing the same twice changes nothing."""
    oracle, model, _ = pair
    engine = continuous(model, TokenBudget(16), cache=PagedCache(64, 8), ahead=ahead)
    runner, scheduler = runner_of(engine), engine.core.scheduler
    count = 0

    def fails() -> None:
        nonlocal count
        count += 1
        if count % 7 == 0:
            raise RuntimeError("injected")

    class Failing:
        def pack(self, batch: Batch) -> Any:
            return runner.pack(batch)

        def launch(self, step: Any) -> Any:
            many = step.slices > 1
            if stage == "before" and many:
                fails()
            if stage == "within" and many:
                with monkeypatch.context() as patch:
                    layer = model.decoder.layers[-1]

                    class Layer:
                        def __call__(self, *given: Any) -> Any:
                            fails()
                            return layer(*given)

                    patch.setattr(runner.decoder, "layers", [*model.decoder.layers[:-1], Layer()])
                    return runner.launch(step)
            launched = runner.launch(step)
            return Late(launched) if stage == "after" and many else launched

    class Late:
        def __init__(self, launched: Any) -> None:
            self.launched = launched

        def output(self) -> Any:
            fails()
            return self.launched.output()

    core = IsolatingCore(scheduler, IsolatingRunner(Failing(), LoadShedding(scheduler)))
    requests = [Request(f"{n}", tuple(prompt), GREEDY) for n, prompt in enumerate(prompts(307, (5, 40, 17)))]
    for request in requests:
        core.submit(request)
    while core.has_work:
        core.step()
    assert count >= 14
    for request in requests:
        assert len(request.output_tokens) == ANSWER
        assert follows(oracle, list(request.prompt_tokens), list(request.output_tokens))


def test_the_memory_of_the_largest_step_has_no_states_in_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They last longer than a step, and are counted once, beside it."""
    _, model, _ = pair
    made, rows = list[Any](), list[int]()

    def runner(*given: Any) -> Any:
        made.append(runner_for(*given))
        return made[-1]

    def peak(work: Callable[[], None], device: torch.device) -> int:
        def count() -> None:
            rows.append(sum(len(tensor) for layer in made[0].states for tensor in layer))

        count()
        work()
        count()
        return 0

    monkeypatch.setattr(sizing, "runner_for", runner)
    monkeypatch.setattr(sizing, "peak_bytes", peak)
    computing = Computing(model, sampler_for(model), model.config.kv_layout(16, "float32"))
    sizing.profile(computing, tokens=64, running=20, context=64)
    assert rows[0] == rows[1] > 20


def test_recorded_decodes_have_the_same_tokens(pair: Pair) -> None:
    """Steps are padded: the states of padding are in the scratch row."""
    oracle, model, _ = pair
    engine = static(model, cache=PagedCache(64, 8))
    runner = runner_of(engine)
    fixed = runner_for(model.decoder, runner.cache, runner.sampler, None, (8, 16))
    assert isinstance(fixed, StatefulRunner)
    fixed.record([1, 4, 8], 128, lambda run: run)
    engine.core.runner = fixed
    given = prompts(model.config.vocab_size, (3, 20, 9))
    for prompt, answer in zip(given, engine.generate(given, GREEDY), strict=True):
        assert follows(oracle, prompt, answer.output_tokens)
    assert all(len(layer.tensors[0]) == 9 for layer in fixed.states)


def test_a_decode_waits_for_nothing_on_the_device(pair: Pair) -> None:
    _, model, _ = pair
    cache = PagedCache(8, 8)
    runner = runner_of(static(model, cache=cache))
    batch = []
    for number in range(3):
        request = Request(f"{number}", (5,), GREEDY)
        cache.attach(request)
        cache.grow(request, 1)
        batch.append(Slice(request, 0, 1))
    step = loaded(Batch(tuple(batch)), cache)
    runner.pack(Batch(tuple(batch)))
    for layer, memory in zip(model.decoder.layers, runner.pool.layers, strict=True):
        if isinstance(memory, LayerState):
            with NothingWaits():
                x = torch.ones(3, model.config.hidden_size)
                out, _ = layer(x, None, model.decoder.rope(1)[0], step, memory)
            assert out.isfinite().all()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(2, 5),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_a_convolution_over_chunks_is_one_over_the_whole_sequence(
    sizes: list[tuple[int, int]], taps: int, biased: bool
) -> None:
    """Each sequence has tokens of earlier steps, and new ones."""
    draw = torch.Generator().manual_seed(len(sizes) + taps)
    width = 3
    weight, bias = torch.randn(width, taps, generator=draw), torch.randn(width, generator=draw) if biased else None
    states = torch.full((len(sizes) + 1, taps - 1, width), torch.nan)
    whole, cache = [], PagedCache(64, 4)
    for number, (old, new) in enumerate(sizes):
        request = Request(f"{number}", (0,) * (old + new))
        cache.attach(request)
        cache.grow(request, old + new)
        whole.append((request, torch.randn(old + new, width, generator=draw)))
    for first in (True, False):
        cut = [(0, old) if first else (old, new) for old, new in sizes]
        parts = [(*each, *where) for each, where in zip(whole, cut, strict=True) if where[1]]
        if not parts:
            continue
        step = loaded(Batch(tuple(Slice(request, start, length) for request, _, start, length in parts)), cache)
        x = torch.cat([numbers[start : start + length] for _, numbers, start, length in parts])
        found = causal_conv(x, states, weight, bias, step).split([length for *_, length in parts])
        for (_, numbers, start, length), own in zip(parts, found, strict=True):
            padded = pad(numbers.T, (taps - 1, 0))[None]
            wanted = conv1d(padded, weight[:, None], bias, groups=width)[0].T[start : start + length]
            torch.testing.assert_close(own, wanted)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 140)), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_delta_rule_over_a_step_is_that_of_transformers_token_by_token(
    sizes: list[tuple[int, int]], seed: int
) -> None:
    """Sequences with tokens of earlier steps and new ones: decodes beside chunks of any length."""
    draw = torch.Generator().manual_seed(seed)
    heads, key_dim, value_dim, cache, batch, whole = 3, 4, 5, PagedCache(512, 16), list[Slice](), list[Tokens]()
    states = torch.full((len(sizes), heads, key_dim, value_dim), torch.nan)
    for number, (old, new) in enumerate(sizes):
        request, shape = Request(f"{number}", (0,) * (old + new)), (old + new, heads)
        cache.attach(request)
        cache.grow(request, old + new)
        q, k = (torch.randn(*shape, key_dim, generator=draw) for _ in range(2))
        k = k / k.norm(dim=-1, keepdim=True)
        v, g = torch.randn(*shape, value_dim, generator=draw), -3 * torch.rand(shape, generator=draw)
        whole.append(Tokens(q, k, v, g, torch.rand(shape, generator=draw)))
        if old:
            before = Tokens(*(each[:old][None] for each in whole[-1]))
            states[number] = in_order(before)[1]
        batch.append(Slice(request, old, new))
    step = loaded(Batch(tuple(batch)), cache)
    given = Tokens(
        *(
            torch.cat([own[part.start :] for own, part in zip(side, batch, strict=True)])
            for side in zip(*whole, strict=True)
        )
    )
    found = delta_rule(given, states, step).split([part.length for part in batch])
    for number, (own, part) in enumerate(zip(whole, batch, strict=True)):
        wanted, state = in_order(Tokens(*(each[None] for each in own)))
        torch.testing.assert_close(found[number], wanted[0, part.start :], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[number], state[0], rtol=1e-4, atol=1e-4)


def in_order(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The results and the last state of transformers, token by token. It scales queries; ours are scaled before."""
    q, k, v, g, beta = tokens
    return torch_recurrent_gated_delta_rule(q * q.shape[-1] ** 0.5, k, v, g, beta, output_final_state=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("CheckpointedPrefixCache, or a PagedCache", lambda model: continuous(model, cache=PrefixCache(8, 8))),
        (
            "speculative_config",
            lambda model: continuous(
                model, cache=PagedCache(8, 8), speculative_config={"method": "ngram", "num_speculative_tokens": 2}
            ),
        ),
        ("tensor_parallel_size", lambda model: check_split(model.config, 2)),
    ],
)
def test_what_does_not_work_with_states_is_refused_by_name(
    pair: Pair, what: str, build: Callable[[Model], object]
) -> None:
    _, model, _ = pair
    with pytest.raises(ConfigError, match=what):
        build(model)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layer_types": ["conv", "mamba", "full_attention"]}, "mamba"),
        ({"conv_L_cache": 1}, "conv_L_cache"),
        ({"conv_bias": 3}, "conv_bias"),
    ],
)
def test_an_lfm2_that_would_be_computed_wrongly_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    model = tiny_model("lfm2", layer_types=["conv", "full_attention", "conv"])
    file = saved(model, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=match):
        config_of(tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("qwen3.5", "qwen3_5"), ("qwen3.5-experts", "qwen3_5_moe")])
def test_the_text_of_a_qwen3_5_with_images_and_drafting_layers_loads(name: str, kind: str, tmp_path: Path) -> None:
    family, options = VARIANTS[name]
    oracle = tiny_model(family, **options)
    file = saved(oracle, tmp_path) / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": kind, "text_config": text | {"mtp_num_hidden_layers": 1}}))
    tensors = load_file(tmp_path / "model.safetensors")
    beside = {"mtp.fc.weight": torch.zeros(4, 4), "model.visual.merger.norm.weight": torch.zeros(4)}
    inside = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(inside | beside, tmp_path / "model.safetensors")
    engine = static(Model.load(tmp_path, device="cpu", dtype="float32"))
    (prompt,) = prompts(307, [19])
    (answer,) = engine.generate([prompt], GREEDY)
    assert follows(oracle, prompt, answer.output_tokens)


def test_a_server_s_engine_serves_it_and_says_what_its_states_and_checkpoints_take(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    oracle, _, directory = pair
    with (
        caplog.at_level("INFO"),
        NanoServingEngine.from_pretrained(
            directory, dtype="float32", device="cpu", kv_cache_pages=24, max_num_batched_tokens=16
        ) as engine,
    ):
        given = alike(engine.parts.model)
        for _ in range(2):
            for prompt, answer in zip(given, engine.generate(given, GREEDY), strict=True):
                assert follows(oracle, prompt, answer.output_tokens)
        assert engine.parts.scheduler.cache.counts.hit_tokens >= 3 * 32
    assert "checkpoints of states in" in caplog.text
    assert "states take" in caplog.text
