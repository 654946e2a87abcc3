"""Model: a directory of weights ready to run: the config, the decoder, and the tokenizer if there is one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phase0_request.checks import ConfigError, check_choice, check_int
from phase0_request.extras.gguf_file import is_gguf
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase1_kv_pool.layout import DTYPE_BYTES
from phase1_kv_pool.memory import free_bytes
from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.backends import backend_for
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.extras.parallel.leader import lead
from phase2_prefill_decode.extras.quantized.layout import SCHEMES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights, random_weights


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
        quantization: str | None = None,
        quantize_embeddings: bool = False,
        kv_cache_dtype: str | None = None,
        backend: Backend | None = None,
        progress: bool = False,
        tensor_parallel_size: int = 1,
        collective_timeout: float = 60.0,
    ) -> "Model":
        """Load a model in Hugging Face layout or from a GGUF file, by default the bundled one, on the GPU if there is
        one, in the dtype of its config. `quantization` is a scheme for the matrices of its layers, such as int8, with
        `quantize_embeddings` for the embedding and lm_head too. On a CPU its kernels are compiled, if they are not in
        the cache, for keys and values in `kv_cache_dtype`. `backend` is by default the fastest one of the device.
        `progress` shows bars. `tensor_parallel_size` is the number of processes that the model is split over,
        `collective_timeout` the seconds that they wait for each other."""
        place = usable(device)
        if dtype is not None:
            check_choice("dtype", dtype, DTYPE_BYTES)
        if quantization is not None:
            check_choice("quantization", quantization, SCHEMES)
        config = ModelConfig.from_pretrained(directory, dtype)
        ranks = check_ranks(config, place, tensor_parallel_size)
        if config.quantization is None and not is_gguf(directory):
            check_memory(config, place, quantization, 1 if place.type == "cpu" else ranks)
        tokenizer = load_tokenizer(directory, config) if Tokenizer.is_in(directory) else None
        how: dict[str, Any] = {"scheme": quantization, "quantize_embeddings": quantize_embeddings, "progress": progress}
        if ranks > 1:
            if backend is not None:
                raise ValueError("backend is for a model on one rank; the others cannot be given functions")
            own = backend_for(place)
            leader = lead(directory, config, place, ranks, kv_cache_dtype, collective_timeout, own, **how)
            return cls(leader.config, leader, tokenizer)
        backend = backend or backend_for(place)
        decoder = Decoder(config, load_weights(directory, config, place, layer_by_layer=True, **how), backend)
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
        """A model of random weights, as fast as a trained one: for benchmarks."""
        config = config if dtype is None else replace(config, dtype=dtype)
        place = usable(device)
        return cls(config, Decoder(config, random_weights(config, place, seed=seed), backend or backend_for(place)))

    @property
    def num_tokens(self) -> int:
        """The number of token ids that have a meaning. The vocabulary may be padded to more: `config.vocab_size`."""
        return self.config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """All end-of-sequence tokens, of the model's files and of the tokenizer's."""
        return frozenset(self.config.eos_token_id) | (self.tokenizer.eos_ids if self.tokenizer else frozenset())


def check_ranks(config: ModelConfig, device: torch.device, ranks: int) -> int:
    """Return the number of ranks if the model can be split over so many, and the machine has a GPU for each."""
    check_int("tensor_parallel_size", ranks, 1)
    config.split(ranks)
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size must be at most the number of GPUs, {torch.cuda.device_count()}; got {ranks}"
        )
    return ranks


def check_memory(config: ModelConfig, device: torch.device, scheme: str | None, devices: int = 1) -> None:
    """ConfigError if the weights alone are larger than the free memory. It says how large they are when quantized."""
    free, size = free_bytes(device), (config.bytes if scheme is None else config.bytes_in(scheme)) // devices
    if free is not None and size > free:
        others = ", ".join(f"{config.bytes_in(name) / 1e9:.1f} in {name}" for name in SCHEMES)
        raise ConfigError(
            f"the model does not fit: its weights take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; with "
            f"quantization they take {others}"
        )


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
