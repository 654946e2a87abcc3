"""Model: a directory of weights made ready to run. Its config, its tokenizer if it has one, and the decoder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.fields import one_of
from phase2_prefill_decode.kernels.attention import Attend
from phase2_prefill_decode.weights import load_weights, random_weights

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine runs. Nothing of it changes while it does."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer | None = None  # without one, prompts are token ids and answers have no text

    @classmethod
    def load(
        cls,
        directory: str | Path = BUNDLED,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        attend: Attend | None = None,
        progress: bool = False,
    ) -> "Model":
        """A model in Hugging Face layout; the bundled one if none is named. By default on the GPU if there is one,
        and in the dtype it was saved in."""
        place = usable(device)
        config = ModelConfig.from_pretrained(directory, None if dtype is None else one_of("dtype", dtype, DTYPES))
        weights = load_weights(directory, config, place, progress=progress)
        tokenizer = Tokenizer.from_pretrained(directory) if (Path(directory) / "tokenizer.json").exists() else None
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens and the model {config.vocab_size}: "
                "not of one model"
            )
        return cls(config, Decoder(config, weights, attend=attend), tokenizer)

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        seed: int = 0,
        attend: Attend | None = None,
    ) -> "Model":
        """A model that has learned nothing, as fast as one that has: for benchmarks."""
        dtype = one_of("dtype", dtype or config.dtype, DTYPES)
        weights = random_weights(config, usable(device), getattr(torch, dtype), seed)
        return cls(config, Decoder(config, weights, attend=attend))

    @property
    def eos_ids(self) -> frozenset[int]:
        """All tokens that end an answer, by the model's files and by the tokenizer's."""
        return frozenset(self.config.eos_ids) | (self.tokenizer.eos_ids if self.tokenizer else frozenset())


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable(device: str | torch.device | None) -> torch.device:
    """The device that is meant, if torch can use it here."""
    if device is None:
        return default_device()
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without what is asked for
        known = " or cuda" if torch.cuda.is_available() else ", for torch sees no GPU"
        raise ValueError(f"device must be cpu{known}, got {str(device)!r}") from error
