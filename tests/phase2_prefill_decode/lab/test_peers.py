"""The scripts that time other engines run the same workloads as ours, and print lines that the comparison reads."""

import ast
from pathlib import Path

import pytest

from phase2_prefill_decode.lab import comparison

PEERS = Path(comparison.__file__).parent / "peers"


@pytest.mark.parametrize("peer", ["vllm", "llama"])
def test_a_peer_runs_the_workloads_of_the_comparison(peer: str) -> None:
    source = (PEERS / f"time_{peer}.py").read_text()
    (workloads,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "WORKLOADS"
    ]
    assert [comparison.Workload(*one) for one in workloads] == list(comparison.WORKLOADS)
    printed = "requests=8 prompt=128 output=64: 7.020 s"
    assert comparison.LINE.search(printed)
    assert 'f"requests={requests} prompt={prompt} output={output}: {' in source
    assert "version" in source
