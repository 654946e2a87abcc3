"""How many pages the cache can have: what the device has left beside the weights and the largest step there can be."""

from collections.abc import Callable
from pathlib import Path

import torch

from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.memory import free_bytes
from phase2_prefill_decode.fields import ConfigError

MOST_ON_CPU = 4 << 30  # bytes; a processor is through with its time before it has filled more


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """What work takes at its peak beyond what was there before, measured by doing it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    before = _forget_peak()
    work()
    return max(_status("VmHWM:") - before, 0)


def pages_that_fit(layout: KVLayout, device: torch.device, share: float, activations: int, useful_tokens: int) -> int:
    """`share` is of all memory the device has, for everything. On a processor's memory, which others use too, a cache
    takes no more than its requests could ever fill."""
    free = free_bytes(device)
    if free is None:
        raise ConfigError("this system does not say how much memory is free; say kv_cache_pages")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        room = total * share - (total - free) - activations
    else:
        room = min(
            free * share - activations, MOST_ON_CPU, -(-useful_tokens // layout.page_size) * layout.bytes_per_page
        )
    pages = int(room) // layout.bytes_per_page
    if pages < 1:
        raise ConfigError(
            f"no memory is left for keys and values: {free / 1e9:.1f} GB are free beside the weights, and a step takes "
            f"{activations / 1e9:.1f} GB; use a smaller max_num_batched_tokens or a higher gpu_memory_utilization"
        )
    return pages


def _forget_peak() -> int:
    """From here on the peak is counted anew. Returns what is in memory now; bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _status("VmHWM:")  # where it cannot be reset, only what exceeds the old one is seen
    return _status("VmRSS:")


def _status(name: str) -> int:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
