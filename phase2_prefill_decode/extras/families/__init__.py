"""Families beyond Llama, Mistral, Qwen2 and Qwen3: each reads its config.json into a description of its layers.

layer     a description of a layer that is not the core's, as data
layers    the modules that such a description stands for
experts   the module of a layer's experts
expert_counts how many of them a step reads, for the record
stateful  a description of a layer with a state in place of pages
recurrent the modules that it stands for
delta_rule what Gated DeltaNet computes
states    the runner that keeps the states of requests
sources   tensors that a checkpoint stores in another form than the decoder reads
known     what a config.json may say
*         a module for each group of families; some are in `dense` and `sparse`
"""

from collections.abc import Mapping

from phase2_prefill_decode.extras.families.dense.ministral import MINISTRAL3
from phase2_prefill_decode.extras.families.dense.olmo import OLMO2, OLMO3
from phase2_prefill_decode.extras.families.dense.phi import PHI3
from phase2_prefill_decode.extras.families.gemma import GEMMA3
from phase2_prefill_decode.extras.families.granite import GRANITE
from phase2_prefill_decode.extras.families.known.classes import CLASSES, NEEDS
from phase2_prefill_decode.extras.families.known.strict import lenient, strict
from phase2_prefill_decode.extras.families.known.wrappers import (
    GEMMA3_WITH_IMAGES,
    MISTRAL3,
    QWEN3_5_MOE_WITH_IMAGES,
    QWEN3_5_WITH_IMAGES,
)
from phase2_prefill_decode.extras.families.lfm import LFM2
from phase2_prefill_decode.extras.families.oss import GPT_OSS
from phase2_prefill_decode.extras.families.qwen import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from phase2_prefill_decode.extras.families.smollm import SMOLLM3
from phase2_prefill_decode.extras.families.sparse.moe import MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from phase2_prefill_decode.loading.families import FAMILIES, UNSUPPORTED, Family

_OTHERS: Mapping[str, Family] = {
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "lfm2": LFM2,
    "ministral3": MINISTRAL3,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "phi3": PHI3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
    "smollm3": SMOLLM3,
}
OTHERS: Mapping[str, Family] = {
    **{name: lenient(family) for name, family in FAMILIES.items()},
    **{name: strict(family) for name, family in _OTHERS.items()},
    "gemma3": GEMMA3_WITH_IMAGES,
    "mistral3": MISTRAL3,
    "qwen3_5": QWEN3_5_WITH_IMAGES,
    "qwen3_5_moe": QWEN3_5_MOE_WITH_IMAGES,
}
UNSUPPORTED.update(NEEDS)


def supported() -> Mapping[str, str]:
    """The classes of transformers that load, and their model types."""
    return {CLASSES[kind]: kind for kind in sorted(OTHERS)}
