from phase0_request.lab import bench


def test_a_larger_batch_trades_latency_between_tokens_for_throughput() -> None:
    """As the chapter says: a batch size of eight gives nearly eight times the tokens of one."""
    one, eight, many = bench.batching(1, 64), bench.batching(8, 64), bench.batching(64, 64)
    assert 4 < eight.tokens_per_second / one.tokens_per_second <= 8
    assert one.itl_p99_ms < eight.itl_p99_ms
    assert one.ttft_p50_ms > eight.ttft_p50_ms > many.ttft_p50_ms
