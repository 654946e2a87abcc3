"""Executes notebooks in a clean kernel of this Python, and removes what differs from run to run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from chapters.course import Course, CourseError, write_atomically

_VOLATILE = ("execution", "ExecuteTime", "collapsed", "scrolled", "colab", "outputId")


class NotebookError(Exception):
    """A cell failed; the text names the notebook, the cell and the error."""


def execute(path: Path, root: Path | None = None, timeout: float = 600) -> Any:
    """Execute a notebook and return it with its outputs; the file is not changed. It runs in `root`, so that imports
    work, and without IPython's configuration. `timeout` is per cell."""
    try:
        import nbformat
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    except ImportError as error:
        raise CourseError(f"notebooks need more packages ({error.name}): pip install nano-serving[course]") from None

    class ThisPython(KernelSpecManager):
        """Always runs this interpreter, whatever kernels the machine has registered."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            argv.append("--IPKernelApp.log_level=40")  # errors; it warns of unencrypted loopback at every start
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    started: list[int] = []  # the cells, by their index
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=timeout,
        km=AsyncKernelManager(kernel_spec_manager=ThisPython()),
        resources={"metadata": {"path": str(root or Course.here().root)}},
        record_timing=False,
        on_cell_start=lambda cell, cell_index: started.append(cell_index),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="course-") as settings:
            found = os.pathsep.join(filter(None, [str(root or Course.here().root), os.environ.get("PYTHONPATH")]))
            own = {"IPYTHONDIR": settings, "PYTHONPATH": found, "PYTHONSAFEPATH": ""}  # ipykernel takes `root` out else
            client.execute(env=os.environ | own, cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        why = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else f"{error}".split("\n")[0]
        raise NotebookError(f"{path.name}, cell {started[-1] + 1}: {why}") from error
    except AssertionError:
        if client.km is None:  # after a Ctrl-C nbclient shuts the kernel down and then misses it
            raise KeyboardInterrupt from None
        raise
    return _stable(notebook)


def _stable(notebook: Any) -> Any:
    """Remove what differs between runs or editors: times, widths, versions, widget state."""
    notebook.metadata.clear()
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        for name in _VOLATILE:
            cell.metadata.pop(name, None)
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output["metadata"] = {}
    return notebook


def write(notebook: Any, path: Path) -> None:
    import nbformat

    write_atomically(path, (nbformat.writes(notebook) + "\n").encode())  # type: ignore[no-untyped-call]
