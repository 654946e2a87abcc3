"""Reads traces of torch's profiler: the share of the time in which the device is idle, and the time of each kernel.

The profiler notes calls of the CUDA runtime beside what the device does, and a wait such as cudaEventSynchronize fills
every gap between two kernels. What counts is the category: kernels, copies and sets of memory. Categories are the same
in the traces of all versions of torch; ranges that `record_function` marks on the device are gaps included, and have
one of their own.
"""

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from phase6_integration.lab.gpu.rows import Day, Row

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_CPU = frozenset({"cpu_op"})  # of a dry run
NAME = 120  # characters of a kernel's name; those of templates have thousands
LISTED = 20  # kernels of a table; the others are summed


class Activity(NamedTuple):
    """Something that the device did, in microseconds."""

    name: str
    start: float
    end: float


def activities(trace: Mapping[str, Any], categories: frozenset[str] = ON_DEVICE) -> list[Activity]:
    """The activities of a Chrome trace in these categories, in the order of their start."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories)
    return sorted((Activity(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events), key=lambda a: a.start)


def busy(ordered: Sequence[Activity]) -> float:
    """The microseconds in which at least one activity runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in ordered:
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total


def idle_share(ordered: Sequence[Activity]) -> float:
    """The share of the time from the first activity to the end of the last in which none runs."""
    if not ordered:
        raise RuntimeError("the profiler saw no activity of the device")
    return 1 - busy(ordered) / (max(activity.end for activity in ordered) - ordered[0].start)


def time_per_kernel(ordered: Sequence[Activity], listed: int = LISTED) -> list[Row]:
    """The calls of each kernel, their microseconds, and their share of the time of all; most first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, start, end in ordered:
        times[name].append(end - start)
    ranked = sorted(((name, len(us), sum(us)) for name, us in times.items()), key=lambda row: -row[2])
    whole = sum(us for _, _, us in ranked)
    if others := ranked[listed:]:
        ranked[listed:] = [(f"{len(others)} others", sum(row[1] for row in others), sum(row[2] for row in others))]
    return [{"name": name[:NAME], "calls": n, "us": us, "share": us / whole} for name, n, us in ranked]


def profiled(day: Day, run: Callable[[], object]) -> list[Activity]:
    """What the device does in a run."""
    # Without these, CUPTI fails when a graph that was recorded before is replayed after a second start of the profiler.
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    with torch.profiler.profile(activities=[ProfilerActivity.CPU if day.dry else ProfilerActivity.CUDA]) as profile:
        run()
        day.wait()
    with TemporaryDirectory() as folder:
        file = Path(folder, "trace.json.gz")
        profile.export_chrome_trace(str(file))
        return activities(json.loads(gzip.decompress(file.read_bytes())), ON_CPU if day.dry else ON_DEVICE)
