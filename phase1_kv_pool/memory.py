"""How much memory is free, on a GPU or on this machine: the smallest of what anyone would let this process have."""

from collections.abc import Iterator
from pathlib import Path

import torch

from phase0_request.machine import describe


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors on this device could still take; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps of tensors that are gone, it gives to the next, or back to the GPU before it fails.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_on_cpu()


def free_on_cpu(root: Path = Path("/")) -> int | None:
    """The least of what the machine has free and what each control group around this process leaves it.

    A container sees the memory of the whole machine in /proc/meminfo; what it may use of it, its groups say.
    """
    free = list(_left_by_groups(root))
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        free += [kib * 1024 for name, kib in _pairs(meminfo) if name == "MemAvailable:"]
    if not free:  # no Linux: all that was built in is the best bound there is
        return describe().memory_bytes
    return max(min(free), 0)


def _left_by_groups(root: Path) -> Iterator[int]:
    """Limit less use, for every group from this process's own to the outermost, in version 2 and in version 1.

    Cached files that nobody reads count as use, and are the first to go.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used, cached = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used, cached = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        base = root / "sys/fs/cgroup" / top
        own = base / path.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(base):
                break
            files = group / limit, group / used, group / "memory.stat"
            if all(file.exists() for file in files) and files[0].read_text().strip() != "max":
                yield int(files[0].read_text()) - int(files[1].read_text()) + dict(_pairs(files[2])).get(cached, 0)


def _pairs(file: Path) -> Iterator[tuple[str, int]]:
    """The lines of a file that say a name and a number."""
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0], int(words[1])
