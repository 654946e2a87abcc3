"""Loads a model over several ranks."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode import connect
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.linears import Wrapped
from phase2_prefill_decode.extras.parallel.group import Group
from phase2_prefill_decode.extras.parallel.layers import ParallelDecoder
from phase2_prefill_decode.extras.parallel.leader import least_free, shared
from phase2_prefill_decode.extras.parallel.ranks import Ranks
from phase2_prefill_decode.extras.parallel.shard import Shard, load_part
from phase2_prefill_decode.extras.parallel.split import split
from phase2_prefill_decode.extras.quantized.at_load import Quantization
from phase2_prefill_decode.loading.weights import check_memory
from phase2_prefill_decode.model import Model, read, usable


def load_split(
    directory: str | Path,
    size: int,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    transform: Quantization | None = None,
    kv_cache_dtype: str | None = None,
    progress: bool = False,
    collective_timeout: float = 60.0,
) -> Model:
    """Load a model over `size` processes, two or more. They wait `collective_timeout` seconds for each other."""
    place = usable(device)
    config, tokenizer = read(directory, dtype)
    split(config, size)  # refuses what cannot be
    if place.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size must be at most the number of GPUs, {torch.cuda.device_count()}; got {size}"
        )
    source = connect.source_of(directory, config)
    whole = (source if transform is None else transform(source, config, place)).nbytes(config)
    share = whole and (whole if place.type == "cpu" else whole // size)  # ranks on a CPU share its memory
    check_memory(share, place, connect.sizes_in_fewer_bits(config))
    shard, group, ranks = Shard(config, 0, size), Group(0, size), Ranks(size)
    try:
        ranks.tell("load", directory, config, size, place.type, transform, torch.get_num_threads())
        weights = load_part(directory, shard, place, transform, progress=progress)
        decoder = ParallelDecoder(shard, weights, group, backend_for(place))
        decoder.backend.compile(decoder, kv_cache_dtype, progress)
        ranks.ask("compile", kv_cache_dtype)  # they find the kernels compiled
        with tempfile.TemporaryDirectory() as folder, ranks.together():
            file = f"{folder}/meeting"
            ranks.tell("connect", file, collective_timeout)
            group.connect(file, collective_timeout, place)
    except BaseException:
        ranks.close()
        raise
    decoder.processes = ranks
    decoder.lm_head = Wrapped(decoder.lm_head, partial(shared, ranks=ranks))
    decoder.backend = replace(decoder.backend, free_bytes=partial(least_free, ranks))
    return Model(decoder.config, decoder, tokenizer)
