"""Connects the extras of this phase to the core, if they are installed."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phase0_request.connect import is_single_file
from phase0_request.support.checks import check_choice, check_extras, has_extras
from phase0_request.support.model_files import naming, read_object
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.families import FAMILIES

if TYPE_CHECKING:  # a server reads the config without torch
    import torch
    from torch import Tensor

    from phase0_request.params import SamplingParams
    from phase0_request.tokenizer import Tokenizer
    from phase1_kv_pool.cache import PagedCache
    from phase2_prefill_decode.backend import Backend
    from phase2_prefill_decode.decoder import Decoder
    from phase2_prefill_decode.extras.quantized.at_load import Quantization
    from phase2_prefill_decode.extras.quantized.layout import Format
    from phase2_prefill_decode.loading.checkpoint import Source
    from phase2_prefill_decode.sampling.processors import Processor
    from phase2_prefill_decode.sampling.sampler import Sampler
    from phase2_prefill_decode.step.runner import ModelRunner

PACKAGE = "phase2_prefill_decode"

if has_extras(PACKAGE):
    from phase2_prefill_decode.extras.families import OTHERS

    FAMILIES.update(OTHERS)


def config_of(model: str | Path, dtype: str | None = None) -> ModelConfig:
    """The configuration of a model, a directory in Hugging Face layout or one file (GGUF). ConfigError if it is not
    supported, or if the format of its weights is not. `dtype` replaces the one of the file."""
    file = Path(model)
    if is_single_file(file):
        check_extras(PACKAGE, "a GGUF file")
        from phase2_prefill_decode.extras.gguf.gguf_config import read_config

        config = read_config(file)
        with naming(file):
            return ModelConfig.from_dict(config, dtype)
    _format_of(file)
    return ModelConfig.from_pretrained(file, dtype)


def source_of(model: str | Path, config: ModelConfig) -> "Source":
    """The source of a model's weights."""
    file = Path(model)
    if is_single_file(file):
        check_extras(PACKAGE, "a GGUF file")
        from phase2_prefill_decode.extras.gguf.gguf import open_file

        return open_file(file, config)
    from phase2_prefill_decode.loading.checkpoint import Checkpoint

    source: Source = Checkpoint(file)
    if (format := _format_of(file)) is not None:
        from phase2_prefill_decode.extras.quantized.checkpoint import QuantizedCheckpoint

        source = QuantizedCheckpoint(Checkpoint(file), format)
    if not has_extras(PACKAGE):
        return source
    from phase2_prefill_decode.extras.families.sources import translated

    return translated(source, config)


def _format_of(directory: Path) -> "Format | None":
    """The format of a checkpoint with quantized matrices."""
    file = directory / "config.json"
    described = read_object(file).get("quantization_config")
    if described is None:
        return None
    check_extras(PACKAGE, f"{file}: a checkpoint with a quantization_config")
    from phase2_prefill_decode.extras.quantized.formats import format_of

    with naming(file):
        return format_of(described)


def add_layers() -> None:
    """Let decoders have the layers of families beyond the core's."""
    if has_extras(PACKAGE):
        from phase2_prefill_decode.decoder import LAYERS
        from phase2_prefill_decode.extras.families.layers import MODULES

        LAYERS.update(MODULES)


def check_quantization(name: str, scheme: object) -> None:
    """ValueError if this quantization scheme does not exist."""
    check_extras(PACKAGE, name)
    from phase2_prefill_decode.extras.quantized.layout import SCHEMES

    check_choice(name, scheme, SCHEMES)


def quantization(scheme: str | None, embeddings: bool = False) -> "Quantization | None":
    """The transform that quantizes a model's matrices while they load, or None."""
    if scheme is None:
        return None
    check_extras(PACKAGE, "quantization")
    from phase2_prefill_decode.extras.quantized.at_load import Quantization

    return Quantization(scheme, embeddings)


def sizes_in_fewer_bits(config: ModelConfig) -> str:
    """The size of a model's weights in each quantization scheme, as the end of a sentence."""
    if not has_extras(PACKAGE):
        return ""
    from phase2_prefill_decode.extras.quantized.layout import SCHEMES, bytes_in

    sizes = ", ".join(f"{bytes_in(config, name) / 1e9:.1f} in {name}" for name in SCHEMES)
    return f"; with quantization they take {sizes}"


def check_split(config: ModelConfig, size: int) -> None:
    """ConfigError if a model cannot be split over `size` processes."""
    if size > 1:
        check_extras(PACKAGE, f"tensor_parallel_size={size}")
        from phase2_prefill_decode.extras.parallel.split import split

        split(config, size)


def check_params(params: "SamplingParams") -> None:
    """ValueError if a request asks for something that only extras do."""
    if not has_extras(PACKAGE) and (asked := params.beyond_a_draw):
        check_extras(PACKAGE, asked[0])


def processors(
    vocab_size: int,
    eos_ids: Collection[int],
    device: "torch.device",
    tokenizer: "Tokenizer | None",
    lm_head: "Callable[[Tensor], Tensor]",
) -> "Sequence[Processor]":
    """The processors of everything that requests may ask for besides a draw."""
    if not has_extras(PACKAGE):
        return ()
    from phase2_prefill_decode.extras.processors import processors_for

    return processors_for(vocab_size, eos_ids, device, tokenizer, lm_head)


def backend_for(device: "torch.device") -> "Backend":
    """The fastest backend for a device. numba and Triton are imported only where they are used."""
    return _gpu() if device.type == "cuda" else _cpu()


@cache
def _cpu() -> "Backend":
    if not has_extras(PACKAGE):
        from phase2_prefill_decode.backend import TORCH

        return TORCH
    from phase2_prefill_decode.extras.cpu.backend import CPU

    return CPU


@cache
def _gpu() -> "Backend":
    from phase2_prefill_decode.backend import triton_backend

    backend = triton_backend()
    if not has_extras(PACKAGE):
        return backend
    from phase2_prefill_decode.extras.quantized.triton_product import compile_products, linear
    from phase2_prefill_decode.extras.streams import weights_for_gpu

    return replace(backend, load_weights=weights_for_gpu, linear=linear, compile=compile_products)


def runner_for(
    decoder: "Decoder",
    cache: "PagedCache",
    sampler: "Sampler",
    kv_cache_dtype: str | None = None,
    size: Sequence[int] = (),
    *,
    ahead: bool = False,
) -> "ModelRunner":
    """The `ModelRunner` of a model over a cache, with the KV pool and the device state that they need. `size` is the
    size of the device state, if it is fixed."""
    from phase1_kv_pool.pool import KVPool
    from phase2_prefill_decode.step.device_state import DeviceState
    from phase2_prefill_decode.step.runner import ModelRunner

    layout = decoder.config.kv_layout(cache.page_size, kv_cache_dtype)
    if has_extras(PACKAGE):
        from phase2_prefill_decode.extras.runners import runner_of

        return runner_of(decoder, layout, cache, sampler, size, ahead)
    pool = KVPool(layout, cache.usage.total, decoder.device)
    return ModelRunner(decoder, pool, cache, sampler, DeviceState(pool.device, *size), ahead=ahead)


class KernelCache(NamedTuple):
    """The place of a CPU's compiled kernels."""

    instructions: str  # that they are compiled for
    place: Path
    is_writable: bool


def kernel_cache() -> KernelCache | None:
    """The cache of compiled kernels; None if none are compiled for a CPU."""
    if not has_extras(PACKAGE):
        return None
    from phase2_prefill_decode.extras.cpu.cache import PLACE, is_writable
    from phase2_prefill_decode.extras.cpu.microkernel import SET

    return KernelCache(SET, PLACE, is_writable())
