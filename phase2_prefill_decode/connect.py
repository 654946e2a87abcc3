"""What the extras of this phase bring to the core, if they are there. The only module of the core that names them."""

from collections.abc import Sequence
from importlib.util import find_spec

from phase2_prefill_decode.loading.model import Model
from phase2_prefill_decode.sampling.processors import Processor
from phase2_prefill_decode.sampling.sampler import Sampler

HAS_EXTRAS = find_spec("phase2_prefill_decode.extras") is not None


def sampler_for(model: Model, seed: int | None = None) -> Sampler:
    """The sampler of a model, on the model's device, with all that requests may ask for beside a draw."""
    decoder = model.decoder
    return Sampler(
        model.config.vocab_size,
        decoder.device,
        seed,
        num_tokens=model.num_tokens,
        processors=processors_for(model) if HAS_EXTRAS else (),
    )


def processors_for(model: Model) -> Sequence[Processor]:
    """In the order of their work: masks follow all that is drawn."""
    from phase2_prefill_decode.extras.embeddings import Embeddings
    from phase2_prefill_decode.extras.grammar.constraints import Constraints
    from phase2_prefill_decode.extras.grammar.grammar import Grammars
    from phase2_prefill_decode.extras.grammar.masks import Masks
    from phase2_prefill_decode.extras.logprobs import DrawnLogprobs, PromptLogprobs
    from phase2_prefill_decode.extras.penalties import Penalties
    from phase2_prefill_decode.extras.verification import Verification

    size, eos_ids, tokenizer, device = model.config.vocab_size, model.eos_ids, model.tokenizer, model.decoder.device
    grammars = None if tokenizer is None else Grammars(tokenizer, size, eos_ids)
    return [
        Verification(),
        DrawnLogprobs(),
        PromptLogprobs(model.decoder.lm_head),
        Embeddings(),
        Penalties(eos_ids, device),
        Masks(Constraints(size, grammars), device, eos_ids),
    ]
