"""RoPE frequencies and tables are those of transformers, for every type and both config formats."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.loading.config import ROPE_TYPES, ModelConfig, RopeParameters
from phase2_prefill_decode.rope import attention_scaling, frequencies, tables
from tests.phase2_prefill_decode.models import ROPES

MAX_LENGTH = 4096
head_dims = st.sampled_from([8, 16, 64, 80, 96, 128, 256])
thetas = st.sampled_from([500.0, 10_000.0, 500_000.0, 1e6])
factors = st.floats(1, 64)
lengths = st.sampled_from([None, 64, 1000, 4096])


def theirs(written: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    """The module of transformers. It gets a copy of the config, because it changes it."""
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": MAX_LENGTH}
    config: Any = AutoConfig.for_model("llama", **sizes, rope_parameters=dict(written))
    return LlamaRotaryEmbedding(config)


def assert_same(written: dict[str, Any], head_dim: int) -> None:
    rope, module = RopeParameters.from_dict(written, MAX_LENGTH), theirs(written, head_dim)
    torch.testing.assert_close(frequencies(rope, head_dim), module.inv_freq, rtol=5e-7, atol=0)
    assert attention_scaling(rope) == pytest.approx(module.attention_scaling, rel=1e-12)


def optional(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Keys that may be present, null or absent."""
    return st.fixed_dictionaries({}, optional={name: st.none() | one for name, one in strategies.items()})


@given(head_dims, thetas, factors)
def test_default_and_linear(head_dim: int, theta: float, factor: float) -> None:
    assert_same({"rope_type": "default", "rope_theta": theta}, head_dim)
    assert_same({"rope_type": "linear", "rope_theta": theta, "factor": factor}, head_dim)


@given(head_dims, thetas, factors, lengths, st.floats(0.1, 8), st.floats(0.1, 64))
def test_llama3(head_dim: int, theta: float, factor: float, length: int | None, low: float, span: float) -> None:
    written = {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    written |= {"low_freq_factor": low, "high_freq_factor": low + span}
    assert_same(written if length is None else written | {"original_max_position_embeddings": length}, head_dim)


@pytest.mark.proof
@settings(max_examples=300)
@given(
    head_dims,
    thetas,
    factors,
    lengths,
    optional(
        beta_fast=st.floats(8, 64),
        beta_slow=st.floats(0.1, 8),
        attention_factor=st.floats(0.5, 2),
        mscale=st.floats(0, 2),
        mscale_all_dim=st.floats(0, 2),
    ),
    st.sampled_from([{}, {"truncate": True}, {"truncate": False}]),
)
def test_yarn(
    head_dim: int, theta: float, factor: float, length: int | None, more: dict[str, Any], truncate: dict[str, bool]
) -> None:
    written = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **more, **truncate}
    assert_same(written if length is None else written | {"original_max_position_embeddings": length}, head_dim)


@pytest.mark.parametrize("turns", [1.0, 4.0, 7.5])
def test_yarn_with_equal_bounds_has_a_step_instead_of_a_ramp(turns: float) -> None:
    written = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    assert_same(written | {"beta_fast": turns, "beta_slow": turns, "truncate": False}, 64)


def test_the_factor_of_yarn_is_derived_from_the_lengths() -> None:
    written = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 256}
    assert RopeParameters.from_dict(written | {"factor": None}, MAX_LENGTH) == RopeParameters.from_dict(
        written, MAX_LENGTH
    )


@pytest.mark.parametrize("kind", ROPES)
def test_tables_are_bit_for_bit_those_of_transformers(kind: str) -> None:
    cos, sin = tables(RopeParameters.from_dict(ROPES[kind], MAX_LENGTH), 64, 3000)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (3000, 32)
    wanted = theirs(ROPES[kind], 64)(torch.zeros(1), torch.arange(3000)[None])
    for mine, whole in zip((cos, sin), wanted, strict=True):
        off = (mine != whole[0, :, :32]).nonzero()
        assert not len(off), f"{kind}: the first (position, pair) that turns by another angle is {off[0].tolist()}"
        assert torch.equal(mine, whole[0, :, 32:])  # which repeats each


def test_tables_are_exact_at_the_last_positions_of_a_long_context() -> None:
    cos, sin = tables(RopeParameters(rope_theta=500_000.0), 16, 131_072)
    module = theirs({"rope_type": "default", "rope_theta": 500_000.0}, 16)
    wanted = module(torch.zeros(1), torch.arange(131_000, 131_072)[None])
    assert torch.equal(cos[131_000:], wanted[0][0, :, :8])
    assert torch.equal(sin[131_000:], wanted[1][0, :, :8])


EARLIER: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 3}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
    {
        "rope_theta": 1e6,
        "rope_scaling": {name: ROPES["llama3"][name] for name in ROPES["llama3"] if name != "rope_theta"},
    },
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
]


@pytest.mark.parametrize("written", EARLIER)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_older_config_formats_are_read_as_transformers_does(family: str, written: dict[str, Any]) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH}
    given = {**sizes, **written}
    config = ModelConfig.from_dict({"model_type": family, **given})
    theirs: Any = AutoConfig.for_model(family, **deepcopy(given))
    module = LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(frequencies(config.rope_parameters, config.head_dim), module.inv_freq, rtol=5e-7, atol=0)
    assert attention_scaling(config.rope_parameters) == pytest.approx(module.attention_scaling, rel=1e-12)


EXTENDED = {"factor": 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type must be one of default, linear, llama3, yarn, longrope, got 'dynamic'"),
        ({"rope_theta": 1}, "rope_theta must be a number above 1, got 1"),
        ({"rope_theta": "10000"}, "rope_theta must be a number above 1, got '10000'"),
        ({"factor": 2}, "rope_type 'default' has no parameter factor, got 2"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 4}, "rope_type 'linear' has no parameter beta_fast, got 4"),
        ({"rope_type": "linear", "factor": 0.5}, "rope factor must be a number from 1, got 0.5"),
        (
            {"rope_type": "llama3", "factor": 8},
            "original_max_position_embeddings must be an integer from 1 to .*got 0",
        ),
        ({"rope_type": "llama3", **EXTENDED, "low_freq_factor": 4.0}, "high_freq_factor must be a number above 4.0"),
        ({"rope_type": "yarn", **EXTENDED, "beta_slow": 40}, "beta_fast must be a number from 40"),
        ({"rope_type": "yarn", **EXTENDED, "truncate": 1}, "truncate must be true or false, got 1"),
        ({"rope_type": "yarn", **EXTENDED, "attention_factor": 0}, "must be a number above 0, got 0"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeParameters(**fields)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_rope_type_without_its_parameters_is_refused(kind: str) -> None:
    needed = {"factor", "low_freq_factor", "high_freq_factor"} & set(ROPE_TYPES[kind])
    with pytest.raises(ConfigError, match=f"rope_type '{kind}' needs {', '.join(sorted(needed))}, got"):
        RopeParameters.from_dict({"rope_type": kind}, MAX_LENGTH)
