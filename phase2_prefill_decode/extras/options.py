"""The options of this phase's extras. A server reads them without torch."""

from dataclasses import dataclass
from functools import partial

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int
from phase0_request.support.options import check_fields, option
from phase2_prefill_decode.extras.quantized.layout import SCHEMES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    quantization: str | None = option(
        None,
        "int8, int4 or fp8: quantize the matrices of the layers when they are loaded (as they were saved)",
        "SCHEME",
        partial(check_choice, allowed=SCHEMES),
        words={"none": None},
    )
    quantize_embeddings: bool = option(False, "with --quantization: the embedding and lm_head too", check=check_bool)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quantize_embeddings and self.quantization is None:
            raise ConfigError("quantize_embeddings is for quantization, which is not set")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    tensor_parallel_size: int = option(
        1,
        "split the model over so many processes, on a GPU each or on the cores of the CPU",
        check=partial(check_int, low=1, high=64),
        flags=("--tensor-parallel-size", "-tp"),
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseOptions:
    enable_piecewise_cuda_graph: bool = option(
        False, "record steps with prompts too, in pieces: for small models on a GPU", check=check_bool
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    disable_hybrid_kv_cache_manager: bool | None = option(
        None,
        "keep all pages of layers with sliding windows (if draft models, tensor parallelism, graphs in pieces or KV "
        "events need it; on a CPU if some layers have none)",
        check=check_bool,
    )

    def __post_init__(self) -> None:
        check_fields(self)
