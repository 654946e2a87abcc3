"""Families beyond Llama, Mistral, Qwen2 and Qwen3: each reads its config.json into a description of its layers.

layer     a description of a layer that is not the core's, as data
layers    the modules that such a description stands for
experts   the module of a layer's experts
stateful  a description of a layer with a state in place of pages
recurrent the modules that it stands for
states    the runner that keeps the states of requests
sources   what checkpoints write otherwise
*         a module for each group of families
"""

from collections.abc import Mapping

from phase2_prefill_decode.extras.families.gemma import GEMMA3
from phase2_prefill_decode.extras.families.granite import GRANITE
from phase2_prefill_decode.extras.families.lfm import LFM2
from phase2_prefill_decode.extras.families.moe import MIXTRAL, OLMOE, QWEN3_MOE
from phase2_prefill_decode.extras.families.olmo import OLMO2
from phase2_prefill_decode.extras.families.oss import GPT_OSS
from phase2_prefill_decode.extras.families.smollm import SMOLLM3
from phase2_prefill_decode.loading.families import Family

OTHERS: Mapping[str, Family] = {
    "gemma3_text": GEMMA3,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "lfm2": LFM2,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
}
