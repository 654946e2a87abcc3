"""Record the figures of a benchmark together with the machine, the versions, the commit and the command.

Every benchmark ends in `record`, so every figure in the book says where it comes from.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phase0_request.support.machine import describe, output_of


def record(path: str | Path, command: str, figures: Mapping[str, Any], *, device: str | None = None) -> None:
    """Write `figures` to `path` as JSON, together with the machine, versions, commit and date.

    `command` repeats the measurement; paths in it are shortened to their last name. `device` is what computed: by
    default the GPU if there is one, else the CPU."""
    machine = describe()
    facts = asdict(machine)
    versions = facts.pop("versions")
    result = {
        "device": device or machine.gpu or machine.cpu,
        "machine": facts,
        "versions": versions,
        "commit": commit(Path(__file__).resolve().parents[2]),
        "command": without_folders(command),
        "date": datetime.now(UTC).date().isoformat(),
        "figures": dict(figures),
    }
    text = json.dumps(result, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, with "-dirty" if a file differs from it; None if there is no commit.

    Changes in chapters/results are ignored, so that one benchmark's result does not mark the next one as dirty."""
    if not (root / ".git").exists():
        return None
    head = output_of("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    changes = output_of("git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)chapters/results")
    return head if changes == "" else f"{head}-dirty"


def without_folders(command: str) -> str:
    """`command` with each absolute path shortened to its last name, so that results contain no private folders."""
    return re.sub(r"(^|[\s='\"])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/]+[\\/])*", r"\1", command)
