"""The start says how much memory of the KV cache is there."""

import logging

import pytest

from phase1_kv_pool.extras import touched
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool
from phase6_integration.engine.connect_engine import touch


def test_the_start_says_how_much_of_the_kv_cache_is_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=64, page_size=16, dtype="float32")
    pool = KVPool(layout, (16 << 20) // layout.bytes_per_page)
    monkeypatch.setattr(touched, "touch", lambda tensors, threads: sum(size for _, size in tensors) // 2)
    with caplog.at_level(logging.INFO):
        touch(pool)
    assert "8 of 16 MB of the KV cache are in memory" in caplog.text
