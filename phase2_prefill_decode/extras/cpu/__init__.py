"""The CPU kernels: Python compiled to machine code by numba."""

import sys
import warnings


def _import_numba() -> None:
    """Import numba so that it never reads `.numba_config.yaml`. It takes that file from the working directory, also
    before each compilation: one in a model's folder could turn compilation off."""
    yaml = sys.modules.get("yaml")
    sys.modules["yaml"] = None  # type: ignore[assignment]  # without it, numba has no files of settings
    try:
        with warnings.catch_warnings(action="ignore"):  # says so, if there is such a file
            from numba.core import config
    finally:
        del sys.modules["yaml"]
        if yaml is not None:
            sys.modules["yaml"] = yaml
    config._config_fname = ""


_import_numba()
