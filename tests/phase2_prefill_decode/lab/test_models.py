"""The figures of published models are those that their authors print."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.models.published import PUBLISHED, published
from phase2_prefill_decode.lab.models.takes import (
    LATENT,
    Latent,
    by_batch,
    held,
    operations,
    reachable,
    takes,
    weights_read,
)

# Of the safetensors files on the hub; all parameters, with a tied lm_head once.
PARAMETERS = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
    "OLMo-2-7B": 7_298_617_344,
    "SmolLM3-3B": 3_075_098_624,
    "Granite-3.3-8B": 8_170_864_640,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-27B": 27_009_346_304,
    "Mixtral-8x7B": 46_702_792_704,
    "OLMoE-1B-7B": 6_919_161_856,
    "Phi-3-mini": 3_821_079_552,
    "Qwen3-30B-A3B": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "Qwen3.5-9B": 8_953_803_264,  # of its class in transformers: the files have a vision tower, too
    "LFM2-1.2B": 1_170_340_608,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_model_has_the_parameters_of_its_files(name: str) -> None:
    assert published(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - PARAMETERS))
def test_a_published_model_has_the_parameters_of_its_class_in_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(PUBLISHED[name]))))
    assert published(name).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_window_ends_what_a_token_can_reach() -> None:
    """Gemma 3 1B: a full layer after five that see 512 tokens, 26 in all; a token of a layer has 1,024 bytes."""
    config = published("Gemma-3-1B")
    assert reachable(config, 512) == 512 * config.kv_layout().bytes_per_token
    assert reachable(config, 32_768) == (22 * 512 + 4 * 32_768) * 1024
    whole = 32_768 * config.kv_layout().bytes_per_token
    assert reachable(config, 32_768) < held(config, 32_768) < whole / 4
    assert held(published("Qwen3-8B"), 32_768) == 32_768 * published("Qwen3-8B").kv_layout().bytes_per_token


def test_a_dense_model_has_the_operations_of_the_cost_model() -> None:
    config = published("Qwen3-8B")
    total, attention = operations(config, 100)
    cost = CostModel(config).pieces([(99, 1)])
    assert (total, attention) == (cost.operations, cost.attention.operations)


def test_a_step_reads_the_experts_that_some_token_has_chosen() -> None:
    """The active parameters are those that Mixtral's authors print, 12.9 billion; many tokens choose all experts."""
    config = published("Mixtral-8x7B")
    assert weights_read(config) + config.vocab_size * config.hidden_size == pytest.approx(12.9e9, rel=0.005)
    every = config.parameters - (config.vocab_size + 2 * config.num_hidden_layers + 1) * config.hidden_size
    assert weights_read(config, 1000) == pytest.approx(every)
    assert weights_read(config) < weights_read(config, 2) < 2 * weights_read(config)


def test_a_shared_expert_is_read_once_whatever_the_batch() -> None:
    """Qwen3.6 35B-A3B: in each of 40 layers three matrices of 512 x 2,048, and a gate; of one token, a ninth."""
    config = published("Qwen3.6-35B-A3B")
    one = by_batch(config)
    assert one["shared"] * 1e9 == 2 * 40 * (3 * 512 * 2048 + 2048)
    experts = (weights_read(config, 10_000) - weights_read(config, 1)) / (256 - 8)
    assert experts == pytest.approx(40 * 3 * 512 * 2048, rel=1e-6)


def test_layers_with_states_take_the_same_at_any_length() -> None:
    """LFM2 1.2B: ten layers of 16 keep two inputs of their convolution, of 2,048 numbers each."""
    config = published("LFM2-1.2B")
    assert takes(config)["state_bytes"] == 10 * 2 * 2048 * 2
    assert reachable(config, 100) == 100 * 6 * 2 * 8 * 64 * 2


def test_latent_attention_stores_one_vector_of_a_token_for_all_heads() -> None:
    """The bytes are those of table 1 in arXiv:2505.09343; the factor of a layer, 576 numbers instead of 128 x 320."""
    latent = LATENT["DeepSeek-V3"]
    assert 2 * latent.numbers_stored == 70_272
    assert latent.numbers_per_head == 61 * 128 * 320


def test_a_query_multiplies_with_the_whole_latent_vector_twice() -> None:
    """A score of 12 numbers, and a sum of 8, for each of 3 heads; the layers do not count."""
    latent = Latent(layers=7, heads=3, latent=8, rotated=4, key=2, value=5)
    assert latent.operations_per_key == 2 * 3 * (12 + 8)
    assert latent.numbers_per_head == 7 * 3 * (6 + 5)
    assert latent.numbers_stored == 7 * 12
