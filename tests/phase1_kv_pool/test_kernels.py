"""How Triton is prepared."""

import os
import sys

import pytest
import torch

from phase1_kv_pool.kernels import prepare_triton
from tests.phase1_kv_pool.support import BACKENDS, device_of


def test_without_a_gpu_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setitem(sys.modules, "triton", sys)
    with pytest.raises(RuntimeError, match=r"imported before it was set .* Call prepare_triton\(\) first"):
        prepare_triton()
    assert os.environ["TRITON_INTERPRET"] == "0"
    monkeypatch.delitem(sys.modules, "triton")
    assert prepare_triton()
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert prepare_triton(), "a second call finds it settled"
    assert {device_of(backend).type for backend in BACKENDS} == {"cpu"}


def test_with_a_gpu_triton_compiles_unless_the_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not prepare_triton()
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert prepare_triton()
    assert [device_of(backend).type for backend in BACKENDS] == ["cpu", "cpu", "cuda"]
