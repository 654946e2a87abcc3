"""The formats of quantized checkpoints, by the quant_method in config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.extras.quantized.awq import AWQ
from phase2_prefill_decode.extras.quantized.compressed import CompressedTensors
from phase2_prefill_decode.extras.quantized.gptq import GPTQ
from phase2_prefill_decode.extras.quantized.layout import Format

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format | None]] = {
    "compressed-tensors": CompressedTensors.from_config,
    "fp8": CompressedTensors.from_fp8_config,
    "gptq": GPTQ.from_config,
    "awq": AWQ.from_config,
    "mxfp4": lambda config: None,  # in the tensors of all experts, which `families.oss_source` takes apart
}


def format_of(config: object) -> Format | None:
    """The format that the quantization_config of a config.json describes. ConfigError if it is not supported."""
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(method, str) or method not in FORMATS:
        raise ConfigError(
            f"quantization_config: quant_method is {method!r}; supported: {', '.join(FORMATS)}, and files in GGUF"
        )
    try:
        return FORMATS[method](config)
    except (AttributeError, TypeError) as error:  # such as a list where an object is expected
        raise ConfigError(f"quantization_config is not as {method} writes it: {error}") from error
