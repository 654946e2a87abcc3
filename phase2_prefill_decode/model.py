"""Model: a directory of weights ready to run: the config, the decoder, and the tokenizer if there is one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phase0_request.support.checks import check_choice
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase1_kv_pool.layout import DTYPE_BYTES
from phase2_prefill_decode import connect
from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.loading.checkpoint import Source
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import check_memory, check_tensors, random_weights
from phase2_prefill_decode.sampling.sampler import Sampler

connect.add_layers()
Transform = Callable[[Source, ModelConfig, torch.device], Source]  # puts weights into another form while they are read


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. It is immutable, and engines may share it."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer | None = None  # without one, prompts are token ids and outputs have no text

    @classmethod
    def load(
        cls,
        directory: str | Path = BUNDLED,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        transform: Transform | None = None,
        kv_cache_dtype: str | None = None,
        backend: Backend | None = None,
        progress: bool = False,
    ) -> "Model":
        """Load a model in Hugging Face layout or from one file, by default the bundled one, on the GPU if there is one,
        in the dtype of its config. `transform` puts its weights into another form. On a CPU its kernels are compiled,
        if they are not in the cache, for keys and values in `kv_cache_dtype`. `backend` is by default the fastest one
        of the device. `progress` shows bars."""
        place = usable(device)
        config, tokenizer = read(directory, dtype)
        source = connect.source_of(directory, config)
        if transform is not None:
            check_tensors(source, config)  # as they are stored
            source = transform(source, config, place)
        check_memory(source.nbytes(config), place, connect.sizes_in_fewer_bits(config))
        backend = backend or connect.backend_for(place)
        decoder = Decoder(config, backend.load_weights(source, config, place, progress=progress), backend)
        backend.compile(decoder, kv_cache_dtype, progress)
        return cls(config, decoder, tokenizer)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        seed: int = 0,
        backend: Backend | None = None,
    ) -> "Model":
        """A model with random weights, as fast as a trained one: for benchmarks."""
        config = config if dtype is None else replace(config, dtype=dtype)
        place = usable(device)
        weights, backend = random_weights(config, place, seed=seed), backend or connect.backend_for(place)
        return cls(config, Decoder(config, weights, backend))

    @property
    def num_tokens(self) -> int:
        """The number of token ids that have a meaning. The vocabulary may be padded to more: `config.vocab_size`."""
        return self.config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens, from the files of the model and of the tokenizer."""
        return frozenset(self.config.eos_token_id) | (self.tokenizer.eos_ids if self.tokenizer else frozenset())


def sampler_for(model: Model, seed: int | None = None) -> Sampler:
    """The sampler of a model, with every processor that its requests may ask for."""
    decoder, size, tokenizer = model.decoder, model.config.vocab_size, model.tokenizer
    processors = connect.processors(size, model.eos_ids, decoder.device, tokenizer, decoder.lm_head)
    return Sampler(size, seed, num_tokens=model.num_tokens, processors=processors, draw=decoder.backend.draw)


def read(directory: str | Path, dtype: str | None = None) -> tuple[ModelConfig, Tokenizer | None]:
    """Read a model's config, with this dtype, and its tokenizer if it has one."""
    if dtype is not None:
        check_choice("dtype", dtype, DTYPE_BYTES)
    config = connect.config_of(directory, dtype)
    return config, load_tokenizer(directory, config) if Tokenizer.is_in(directory) else None


def load_tokenizer(directory: str | Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer in a directory, for a model with this config."""
    tokenizer = Tokenizer.from_pretrained(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}: "
            "not of one model"
        )
    return tokenizer


def default_device() -> torch.device:
    """The GPU if torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable(device: str | torch.device | None) -> torch.device:
    """Return the device if torch can use it on this machine; by default the GPU if there is one."""
    if device is None:
        return default_device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without it
        known = " or cuda" if torch.cuda.is_available() else ", for torch sees no GPU"
        raise ValueError(f"device must be cpu{known}, got {str(device)!r}") from error
