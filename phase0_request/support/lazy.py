"""Lazy imports: a package's public names are imported on first use, so importing the package does not load torch."""

from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` (PEP 562) and `__all__` of a package. Its `__init__.pyi` gives the module of each name."""
    home = {}
    with open(f"{file}i", encoding="utf-8") as stub:
        for line in stub:
            match line.split():
                case ["from", module, "import", name, "as", _]:
                    home[name] = module

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home[name]), name)

    return get, list(home)
