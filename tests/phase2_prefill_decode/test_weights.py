"""Weights: every tensor of a checkpoint is loaded, and into its place. The oracle is transformers' model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.loading.checkpoint import INDEX, SINGLE, Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import (
    EMBED_TOKENS,
    Weights,
    empty_weights,
    load_weights,
    places,
    random_weights,
)
from tests.phase2_prefill_decode.models import VARIANTS, saved, variant

SHARDS = "20KB"
SMALL = ModelConfig(
    vocab_size=300,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_size=64,
    qk_norm=True,
    qkv_bias=True,
    dtype="float32",
)


def load(directory: Path, **options: Any) -> Weights:
    return load_weights(Checkpoint(directory), ModelConfig.from_pretrained(directory), **options)


def assert_holds(weights: Weights, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Every parameter of the model is in its place, and nothing else."""
    wanted = dict(model.named_parameters())  # a tied head is not among them
    found = places(weights, ModelConfig.from_dict(model.config.to_dict() | {"dtype": "float32"}))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == (dtype or tensor.dtype), name
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("shards", ["1GB", SHARDS])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_is_loaded_into_its_place(name: str, shards: str, tmp_path: Path) -> None:
    model = variant(name)
    saved(model, tmp_path, shards_of=shards)
    assert (tmp_path / INDEX).exists() == (shards == SHARDS)
    weights = load(tmp_path)
    assert_holds(weights, model)
    assert (weights.lm_head is weights.embed_tokens) == model.config.tie_word_embeddings
    layer, theirs = weights.layers[1], model.model.layers[1]
    attention = theirs.self_attn
    together = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert torch.equal(layer["qkv_proj"], together)
    assert torch.equal(layer["gate_up_proj"], torch.cat((theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight)))


DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES[1:])
def test_any_dtype_is_converted_to_any_other(kept: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = variant("qwen2", dtype=kept)
    saved(model, tmp_path)
    config = ModelConfig.from_pretrained(tmp_path, dtype=str(wanted).removeprefix("torch."))
    weights = load_weights(Checkpoint(tmp_path), config)
    assert_holds(weights, model, wanted)


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds all memory that tensors allocated, so that none is counted twice or reused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.pieces[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return result

    @property
    def bytes(self) -> int:
        return sum(piece.nbytes() for piece in self.pieces.values())


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_loading_takes_the_memory_of_the_weights_and_of_the_mapped_file(kept: torch.dtype, tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(saved(variant("qwen3", dtype=kept), tmp_path), "bfloat16")
    with Made() as made:
        load_weights(Checkpoint(tmp_path), config)
    assert made.bytes <= 2 * config.parameters + (tmp_path / SINGLE).stat().st_size


# Checkpoints of another model.


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A saved model with changed tensors."""
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)
    return directory


@pytest.mark.proof
def test_one_error_lists_all_that_is_missing_unexpected_or_misshapen(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 80)
        tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["model.layers.2.self_attn.o_proj.weight"] = torch.zeros(64, 64, dtype=torch.int8)

    rewritten(saved(variant("llama"), tmp_path), spoil)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path} does not hold the weights of its configuration:"
    assert sorted(line.strip() for line in lines) == [
        "model.layers.0.mlp.down_proj.bias is unexpected: found [64]",
        "model.layers.0.mlp.up_proj.weight is misshapen: wanted [80, 64], found [64, 80]",
        "model.layers.1.self_attn.k_proj.weight is missing: wanted [32, 64]",
        "model.layers.2.self_attn.o_proj.weight holds I8: readable are F64, F32, F16, BF16, F8_E4M3, F8_E5M2",
        "model.layers.3.input_layernorm.weight is unexpected: found [64]",
        "model.norm.weight is missing: wanted [64]",
    ]


def test_superfluous_tensors_of_older_checkpoints_are_ignored(tmp_path: Path) -> None:
    model = variant("llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.rotary_emb.inv_freq": torch.ones(8)}
    rewritten(saved(model, tmp_path), lambda tensors: tensors.update(extra))
    assert_holds(load(tmp_path), model)


def test_a_tied_head_may_be_saved_if_it_is_the_embedding(tmp_path: Path) -> None:
    model = variant("qwen2-tied")
    copy = model.lm_head.weight.detach().clone()
    rewritten(saved(model, tmp_path), lambda tensors: tensors.update({"lm_head.weight": copy}))
    assert_holds(load(tmp_path), model)
    copy[3, 5] += 1
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": copy}))
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(tmp_path)


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    rewritten(saved(variant("llama"), tmp_path), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lm_head.weight is missing: wanted \[307, 64\]"):
        load(tmp_path)


# Broken files.


@pytest.mark.parametrize("kept", [0, 5, 500, -1])
@pytest.mark.parametrize("shards", ["1GB", SHARDS])
def test_a_truncated_file_is_named(kept: int, shards: str, tmp_path: Path) -> None:
    saved(variant("llama"), tmp_path, shards_of=shards)
    file = max(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=f"{file.name} is damaged or was not copied whole: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (90_000, "the list of its tensors would take 5[0-9]{6} bytes, and at most 4194304"),
        (44_000, "holds more than 131072 tensors; no supported model has as many"),
    ],
)
def test_more_tensors_than_any_model_has_are_refused_before_they_are_read(
    tmp_path: Path, each: int, message: str
) -> None:
    """In one file, or in several. A header of 1.5 million tensors loaded for minutes, and took gigabytes."""
    saved(variant("llama"), tmp_path, shards_of=SHARDS)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) >= 3
    for place, file in enumerate(files):
        names = range(place * each, (place + 1) * each)
        header = b"{%s}" % b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % name for name in names)
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(variant("llama"), tmp_path, shards_of=SHARDS)
    lost = min(tmp_path.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(ConfigError, match=f"{lost.name} cannot be read: No such file"):
        load(tmp_path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"holds neither {SINGLE} nor {INDEX}$"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pickled weights .* are not read, because loading a pickle runs code"):
        Checkpoint(tmp_path)


def with_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A sharded model with a changed index."""
    saved(variant("llama"), directory, shards_of=SHARDS)
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("leading_out", ["../x.safetensors", "a/../../x", "{}/x", r"..\x", r"C:\x", "//host/x", "", 5])
def test_an_index_may_not_lead_out_of_its_directory(leading_out: Any, tmp_path: Path) -> None:
    inside = tmp_path / "model"
    if isinstance(leading_out, str):
        leading_out = leading_out.format(tmp_path)
    with_index(inside, lambda files: files.update({"model.norm.weight": leading_out}))
    shutil.copy(min(inside.glob("*.safetensors")), tmp_path / "x.safetensors")  # the target exists
    with pytest.raises(ConfigError, match="must name files inside its directory, got "):
        load(inside)


def test_shards_may_lie_in_a_folder_of_the_directory(tmp_path: Path) -> None:
    inside = with_index(tmp_path, lambda files: files.update({name: f"parts/{file}" for name, file in files.items()}))
    (inside / "parts").mkdir()
    for file in inside.glob("*.safetensors"):
        file.rename(inside / "parts" / file.name)
    assert_holds(load(inside), variant("llama"))


def test_what_a_file_holds_counts_and_not_what_the_index_says_of_it(tmp_path: Path) -> None:
    def change(files: dict[str, Any]) -> None:
        files["model.layers.9.mlp.up_proj.weight"] = files.pop("model.layers.0.mlp.up_proj.weight")

    assert_holds(load(with_index(tmp_path, change)), variant("llama"))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    saved(variant("llama"), tmp_path, shards_of=SHARDS)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    tensors = load_file(first)
    save_file(load_file(second) | tensors, second)
    with pytest.raises(ConfigError, match=f"{second.name} holds {min(tensors)}, and another file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "must hold a weight_map"),
        (b'{"weight_map": {}}', "must hold a weight_map"),
    ],
)
def test_a_broken_index_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Checkpoint(tmp_path)


# Random weights.


def test_random_weights_depend_only_on_their_seed() -> None:
    first, same, other = (places(random_weights(SMALL, seed=seed), SMALL) for seed in (3, 3, 4))
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert not torch.equal(same[EMBED_TOKENS], other[EMBED_TOKENS])
    assert not torch.equal(*(same[f"model.layers.{number}.self_attn.q_proj.weight"] for number in (0, 1)))


@pytest.mark.parametrize("name", VARIANTS)
def test_random_weights_leave_nothing_uninitialised(name: str, tmp_path: Path) -> None:
    """New memory is filled with NaN, as uninitialised memory may be."""
    model = variant(name)
    config = ModelConfig.from_pretrained(saved(model, tmp_path))
    torch.use_deterministic_algorithms(True)  # with this, torch fills new memory with NaN
    try:
        assert bool(empty_weights(config, "cpu").norm.isnan().all())
        made = random_weights(config)
    finally:
        torch.use_deterministic_algorithms(False)
    found = places(made, config)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in model.named_parameters()}
    assert [n for n, t in found.items() if not bool(t.isfinite().all())] == []
    assert (made.lm_head is made.embed_tokens) == config.tie_word_embeddings
    assert sum(place.numel() for place in found.values()) == config.parameters


def test_a_file_or_a_pipe_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(variant("llama"), tmp_path)
    capfd.readouterr()
    load(tmp_path, progress=True)
    assert capfd.readouterr() == ("", "")
