import json
from pathlib import Path

from phase0_request import bench


def test_it_serves_every_request_and_records_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "host_cost.json"
    bench.main(["--num-requests", "200", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"] == "python -m phase0_request.bench --num-requests 200"
    assert result["figures"]["num_requests"] == 200
    by_batch = [result["figures"][f"batch_{size}"] for size in bench.BATCH_SIZES]
    assert all(figures["per_request_step_us"] > 0 for figures in by_batch)
    steps = [figures["steps"] for figures in by_batch]
    assert steps == sorted(steps, reverse=True)  # larger batches take fewer steps over the same tokens
