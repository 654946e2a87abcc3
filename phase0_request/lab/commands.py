"""`python -m phaseN_x.lab NAME`: run or list the commands of a lab."""

import argparse
import ast
import re
import sys
from importlib import import_module
from pathlib import Path


def main(package: str, arguments: list[str] | None = None) -> int:
    """Run the module named by the first argument with the remaining arguments. Without a name, list the modules."""
    prog = f"python -m {package}"
    p = argparse.ArgumentParser(prog=prog, usage=f"{prog} [NAME [options]]", add_help=False)
    p.add_argument("name", nargs="?")
    given = sys.argv[1:] if arguments is None else arguments
    known = contents(package)
    if not given or given[0] in ("-h", "--help"):
        width = max(map(len, known))
        print(f"usage: {prog} NAME [options]; NAME --help shows its options\n")
        print("\n".join(f"  {name:{width}}  {about}" for name, about in known.items()))
        return 0
    name, *options = given
    if name not in known:
        p.error(f"there is no {name!r} here; it has {', '.join(known)}")
    code: int = import_module(f"{package}.{name}").main(options)
    return code


def contents(package: str) -> dict[str, str]:
    """Every module with a `main(arguments)`, and the first line of its docstring. Imports none of them."""
    (folder,) = import_module(package).__path__
    commands = {}
    for file in sorted(Path(folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        if mains and mains[0].args.args[0].arg == "arguments":
            about = (ast.get_docstring(tree) or "").partition("\n")[0]
            name = ".".join(file.relative_to(folder).with_suffix("").parts)
            commands[name] = re.sub(r"^`python -m [^`]*`: ", "", about)
    return commands
