"""Loads a model over several ranks."""

from pathlib import Path

import torch

from phase0_request.support.checks import ConfigError, check_int
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode import connect
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.parallel.leader import lead
from phase2_prefill_decode.extras.parallel.split import split
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.loading.weights import check_memory
from phase2_prefill_decode.model import Model, read, usable


def load_split(
    directory: str | Path = BUNDLED,
    size: int = 1,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    transform: Quantization | None = None,
    kv_cache_dtype: str | None = None,
    progress: bool = False,
    collective_timeout: float = 60.0,
) -> Model:
    """Load a model over `size` processes, as `Model.load` does on one. They wait `collective_timeout` seconds for each
    other."""
    if check_int("tensor_parallel_size", size, 1) == 1:
        return Model.load(
            directory,
            device=device,
            dtype=dtype,
            transform=transform,
            kv_cache_dtype=kv_cache_dtype,
            progress=progress,
        )
    place = usable(device)
    config, tokenizer = read(directory, dtype)
    split(config, size)  # refuses what cannot be
    if place.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size must be at most the number of GPUs, {torch.cuda.device_count()}; got {size}"
        )
    source = connect.source_of(directory)
    whole = (source if transform is None else transform(source, config, place)).nbytes(config)
    share = whole and (whole if place.type == "cpu" else whole // size)  # ranks on a CPU share its memory
    check_memory(share, place, connect.sizes_in_fewer_bits(config))
    own = backend_for(place)
    leader = lead(directory, config, place, size, kv_cache_dtype, collective_timeout, own, transform, progress=progress)
    return Model(leader.config, leader, tokenizer)
