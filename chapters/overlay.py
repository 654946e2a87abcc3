"""Imports modules from a folder that mirrors the root: the workspace's code in place of the reference."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType


class OverlayLoader(SourceFileLoader):
    """Runs another file's code in place of the reference. `__file__` stays the reference's, so that data files next
    to the module are found; line numbers and tracebacks are those of the code that runs."""

    def __init__(self, name: str, reference: Path, replacement: Path) -> None:
        super().__init__(name, str(reference))
        self._replacement = replacement

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._replacement.read_bytes(), str(self._replacement), "exec", dont_inherit=True)


class OverlayFinder(MetaPathFinder):
    """Finds the modules in the overlay folder that differ from the reference, and no others."""

    def __init__(self, root: Path, overlay: Path) -> None:
        changed = [path for path in overlay.rglob("*.py") if not _same(path, root / path.relative_to(overlay))]
        self._files = {_module_name(path.relative_to(overlay)): path for path in changed}
        self._references = {name: root / path.relative_to(overlay) for name, path in self._files.items()}
        early = sorted(self._files.keys() & sys.modules.keys())
        if early:
            raise ImportError(f"imported before the overlay could replace them: {', '.join(early)}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        reference = self._references[fullname]
        packages = [str(reference.parent)] if reference.name == "__init__.py" else None
        loader = OverlayLoader(fullname, reference, self._files[fullname])
        return spec_from_file_location(fullname, reference, loader=loader, submodule_search_locations=packages)


def _same(path: Path, reference: Path) -> bool:
    return reference.is_file() and path.read_bytes() == reference.read_bytes()


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def install(root: Path, overlay: Path) -> None:
    """From now on, import modules that are in `overlay` from there. None of them may have been imported before."""
    sys.meta_path.insert(0, OverlayFinder(root, overlay))


def environment(root: Path, base: Mapping[str, str], overlay: Path | None = None) -> dict[str, str]:
    """`base` for a Python process of the course, and for those that it starts: with `overlay`, they import from it."""
    home = Path(__file__).resolve().parent
    path = [str(root), str(home.parent), str(home / "children"), base.get("PYTHONPATH")]
    given = {"NANO_COURSE_ROOT": str(root), "NANO_COURSE_OVERLAY": str(overlay)} if overlay else {}
    return {**base, "PYTHONPATH": os.pathsep.join(filter(None, path)), **given}
