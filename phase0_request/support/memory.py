"""How much memory is free for tensors: on a GPU, or on this machine within the limits of its control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes available for new tensors on a device; None if the system does not report it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved and not allocated is reused for new tensors, so it counts as free.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_on_cpu()


def free_on_cpu(root: Path = Path("/")) -> int | None:
    """The minimum of the machine's available memory and the limits of this process's control groups.

    In a container /proc/meminfo shows the memory of the whole machine; the limit of the container is in its cgroup.
    """
    free = list(_left_by_groups(root))
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        free += [kib * 1024 for name, kib in _pairs(meminfo) if name == "MemAvailable:"]
    elif "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: total memory is the best bound available
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return max(min(free), 0) if free else None


def _left_by_groups(root: Path) -> Iterator[int]:
    """Limit minus usage of each control group, from this process's own to the root, for cgroup v2 and v1.

    Inactive file cache counts as usage but is reclaimed first, so it is added back.
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
    """The lines of a file that consist of a name and a number."""
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0], int(words[1])
