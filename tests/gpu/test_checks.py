"""The kernels that compute-sanitizer looks at on a GPU day: they run on any device, here also on one that is not there,
where `test_devices` runs this file."""

import pytest
import torch

from phase6_integration.lab.gpu import checks
from tests.phase1_kv_pool.support import device_of


@pytest.mark.parametrize("part", [checks.attention, checks.draw, checks.products, checks.experts])
def test_what_the_sanitizer_looks_at_has_finite_results(part: checks.Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HALF", torch.float16)  # which Triton's interpreter has, too
    results = list(part(device_of("triton")))
    assert len(results) >= 2
    assert all(result.isfinite().all() for result in results)
