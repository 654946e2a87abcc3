"""What follows from the longest sequence that an engine serves: LongRoPE's factors."""

import logging
from copy import copy
from dataclasses import replace

from phase2_prefill_decode.loading.config import LayerConfig
from phase2_prefill_decode.model import Model

log = logging.getLogger(__name__)


def for_context(model: Model, context: int) -> Model:
    """The model for sequences of up to `context` tokens: with the short factors of LongRoPE, if none is longer than the
    original context."""
    layers = tuple(_for_context(layer, context) for layer in model.config.layers)
    if layers == model.config.layers:
        if original := max((_original(layer) for layer in layers), default=0):
            log.warning(
                "for a context of %d tokens, all requests have the long factors of LongRoPE, also those for which "
                "transformers takes the short ones; with --max-model-len %d they have these",
                context,
                original,
            )
        return model
    decoder, config = copy(model.decoder), replace(model.config, layers=layers)
    decoder.config, decoder._positions = config, -1  # its tables are computed again
    return replace(model, config=config, decoder=decoder)


def _original(layer: LayerConfig) -> int:
    """The context up to which a layer's short factors are meant; 0 if it has no others."""
    rope = layer.rope
    return 0 if rope is None or rope.factors == rope.short_factors else rope.original_max_position_embeddings


def _for_context(layer: LayerConfig, context: int) -> LayerConfig:
    if (rope := layer.rope) is None or context > _original(layer):
        return layer
    return replace(layer, rope=replace(rope, factors=rope.short_factors))
