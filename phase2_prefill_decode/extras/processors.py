"""All processors of a sampler, in the order of their work."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.extras.embeddings import Embeddings
from phase2_prefill_decode.extras.grammar.constraints import Constraints
from phase2_prefill_decode.extras.grammar.grammar import Grammars
from phase2_prefill_decode.extras.grammar.masks import Masks
from phase2_prefill_decode.extras.logprobs import DrawnLogprobs, PromptLogprobs
from phase2_prefill_decode.extras.penalties import Penalties
from phase2_prefill_decode.extras.verification import Verification
from phase2_prefill_decode.sampling.processors import Processor


def processors_for(
    vocab_size: int,
    eos_ids: Collection[int],
    device: torch.device,
    tokenizer: Tokenizer | None,
    lm_head: Callable[[Tensor], Tensor],
) -> Sequence[Processor]:
    """The processors, in the order in which they edit logits and finish. Masks edit after everything that shifts
    logits, and finish last, because they follow the drawn tokens. A filter of the remaining tokens comes after them."""
    grammars = None if tokenizer is None else Grammars(tokenizer, vocab_size, eos_ids)
    return [
        Verification(),
        DrawnLogprobs(),
        PromptLogprobs(lm_head),
        Embeddings(),
        Penalties(eos_ids, device),
        Masks(Constraints(vocab_size, grammars), device, eos_ids),
    ]
