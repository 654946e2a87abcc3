"""Whether the pins and the ranges can be installed: every supported Python and platform, from the public index alone.

`python .ci/resolve.py` asks uv, which resolves for a Python and a platform that are not there. What this machine adds
of its own (pip's and uv's configuration, other indexes, local wheels) is left out, so that it can hide nothing.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
}
VERSIONS = {
    "pins": (
        "--constraint",
        str(ROOT / ".ci/constraints.txt"),
        "--constraint",
        str(ROOT / ".ci/book.txt"),
        "--constraint",
        str(ROOT / ".ci/cluster.txt"),
    ),
    "newest": (),
    "oldest": ("--resolution", "lowest-direct"),
}
EXTRAS = {"serve": (), "dev": ("--extra", "dev"), "cluster": ("--extra", "cluster"), "book": ("--group", "book")}
SHOWN = ("torch", "triton", "transformers")
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
KEPT = ("PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", *PROXIES)  # how to reach the index, not which one


def main() -> int:
    """Print a row for each platform and kind of versions; 1 if something cannot be installed."""
    cases = list(product(PLATFORMS, VERSIONS, PYTHONS, EXTRAS))
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(8) as pool:
        results = dict(zip(cases, pool.map(lambda case: resolve(*case, home), cases), strict=True))
    print(f"{'platform':14} {'versions':9} {'  '.join(PYTHONS)}")
    for platform, versions in product(PLATFORMS, VERSIONS):
        row = {case: said for case, said in results.items() if case[:2] == (platform, versions)}
        marks = [all(row[platform, versions, python, extra][0] for extra in EXTRAS) for python in PYTHONS]
        shown = " or ".join(sorted({said for done, said in row.values() if done}))
        print(f"{platform:14} {versions:9} {'  '.join('yes ' if mark else 'NO  ' for mark in marks)}  {shown}")
    failed = [(case, said) for case, (done, said) in results.items() if not done]
    for case, said in failed:
        print("", *case, said, sep="  ")
    print(f"{len(cases) - len(failed)} of {len(cases)} can be installed ({' and '.join(EXTRAS)} each)")
    return 1 if failed else 0


def resolve(platform: str, versions: str, python: str, extra: str, home: str) -> tuple[bool, str]:
    """Whether there is a set of wheels for this case, and which; or why not."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"HOME": home, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that torch has wheels for
    where = ("--python-version", python, "--python-platform", PLATFORMS[platform])
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--no-config", "--system-certs"]
    command += ["--no-python-downloads", "--only-binary", ":all:", "--no-annotate", *where, *VERSIONS[versions]]
    done = subprocess.run(
        [*command, *EXTRAS[extra], "pyproject.toml"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        return False, " ".join(line for line in done.stderr.split("\n") if "warning" not in line)[:600]
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return True, " ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


if __name__ == "__main__":
    sys.exit(main())
