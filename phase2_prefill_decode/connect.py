"""What the extras of this phase bring to the core, if they are there. The only module of the core that names them."""

from collections.abc import Sequence
from importlib.util import find_spec

from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.processors import Processor
from phase2_prefill_decode.sampling.sampler import Sampler

HAS_EXTRAS = find_spec("phase2_prefill_decode.extras") is not None


def sampler_for(model: Model, seed: int | None = None) -> Sampler:
    """The sampler of a model, on the model's device, with all that requests may ask for beside a draw."""
    decoder, size, tokenizer = model.decoder, model.config.vocab_size, model.tokenizer
    processors: Sequence[Processor] = ()
    if HAS_EXTRAS:
        from phase2_prefill_decode.extras.processors import processors_for

        processors = processors_for(size, model.eos_ids, decoder.device, tokenizer, decoder.lm_head)
    return Sampler(
        size, decoder.device, seed, num_tokens=model.num_tokens, processors=processors, draw=decoder.backend.draw
    )
