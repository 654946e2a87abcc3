"""Imported by the process that `testing` forks for each run: the libraries that tests use, so that a run starts with
them, and the environment in which they are imported.

What changes the words of pytest is removed: its options, and the variables by which it knows CI. Plugins that are
installed beside it are not loaded: no test of the course needs one, and they add two seconds to a run.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

from chapters.course import COMPILED, Course

for name in [
    name for name in os.environ if name.startswith("PYTEST_") or name in ("CI", "BUILD_NUMBER", "PYTHONWARNINGS")
]:
    del os.environ[name]
os.environ |= {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_CACHE_DIR": str(Course.here().root / COMPILED),
}
for name in ("pytest", "hypothesis.stateful", "torch", "numba", "transformers", "fastapi", "prometheus_client"):
    with suppress(ImportError):
        import_module(name)
gc.freeze()  # the garbage collector of a run, which pytest calls at its end, leaves them out
