"""The engine tests of a GPU on a CPU: kernels are interpreted, and what a CUDA graph would record the recorder of
`captured` does. They take minutes, and show what none of them shows on a machine without a GPU: that they run.

`python -m pytest -p tests.gpu.interpreted -n0 tests/gpu/test_engine.py -k NAMES`
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.gpu.captured import Recorder
from tests.phase1_kv_pool import support

support.needs_gpu = pytest.mark.skipif(False, reason="interpreted")


def pytest_configure(config: pytest.Config) -> None:
    from phase1_kv_pool.kernels import prepare_triton

    prepare_triton()
    from phase2_prefill_decode import connect
    from phase2_prefill_decode.extras.families import experts
    from phase2_prefill_decode.extras.parallel import shard
    from phase2_prefill_decode.extras.parallel.group import Group
    from phase2_prefill_decode.extras.quantized.triton_grouped import TritonGroups
    from phase2_prefill_decode.extras.quantized.triton_product import TritonProduct
    from phase2_prefill_decode.linear import TorchLinear
    from phase6_integration.engine import assemble, runners

    def linear(weight: Any, bias: torch.Tensor | None = None) -> Any:
        return (TorchLinear if isinstance(weight, torch.Tensor) else TritonProduct)(weight, bias)

    @cache
    def backend() -> Any:
        return replace(connect._gpu(), linear=linear, compile=lambda *_: None)

    Group.gather = lambda self, part: [part.clone()]  # of one rank; gloo's is no operator that can be recorded
    whole = shard.by_layers
    shard.by_layers = lambda *given, **how: whole(*given, **{**how, "streamed": False})
    steps = assemble.steps_to_record
    assemble.steps_to_record = lambda options, device, *sizes: steps(options, torch.device("cuda"), *sizes)
    assemble.graph_bytes = lambda *_: 0
    runners.cuda_record = Recorder
    connect._cpu = backend
    experts.grouped = lambda product, groups, device: TritonGroups(product, groups)


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        if "bfloat16" in item.name:
            item.add_marker(pytest.mark.skip(reason="the interpreter multiplies no bfloat16"))
        if hasattr(item.module, "DEVICE"):  # type: ignore[attr-defined]
            item.module.DEVICE = "cpu"  # type: ignore[attr-defined]
