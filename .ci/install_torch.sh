#!/bin/sh
# Make the environment, install the server's libraries, whose hashes pip checks, and then the torch that suits this
# machine. pip says what it does: it takes minutes.
# Usage: PYTHON=... VENV=... install_torch.sh auto|cpu|cuda|system
set -eu
CPU_WHEELS=https://download.pytorch.org/whl/cpu
choice=$1
python=$VENV/bin/python

supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))'
if ! "$PYTHON" -c "$supported"; then
  echo "Python 3.11 to 3.14 is needed, and $PYTHON is $("$PYTHON" --version 2>&1): say PYTHON=python3.12, for example" >&2
  exit 2
fi
if [ -x "$python" ] && ! "$python" -c "$supported"; then
  echo "$VENV was made with $("$python" --version 2>&1); run 'make clean' first" >&2
  exit 2
fi
"$python" -m pip --version > /dev/null 2>&1 || "$PYTHON" -m venv "$VENV"

if [ "$choice" = auto ]; then
  choice=cuda fallback=yes
  if [ "$(uname)" = Linux ] && ! [ -e /proc/driver/nvidia/version ] && ! [ -e /dev/nvidiactl ] \
    && ! [ -e /usr/lib/wsl/lib/libcuda.so.1 ]; then
    choice=cpu
  fi
fi

case $choice in
  system) # a path file, so that the environment sees the torch of PYTHON, and whatever else PYTHON has
    "$PYTHON" - "$VENV" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'END'
import importlib.metadata as metadata, pathlib, re, sys

try:
    torch = metadata.distribution("torch")
except metadata.PackageNotFoundError:
    sys.exit(f"TORCH=system uses the torch of {sys.executable}, which has none: say PYTHON=... or leave TORCH out")
oldest = re.search(r'"torch>=([\d.]+)"', pathlib.Path("pyproject.toml").read_text())[1]
if [int(part) for part in re.findall(r"\d+", torch.version)[:2]] < [int(part) for part in oldest.split(".")]:
    sys.exit(f"TORCH=system: {sys.executable} has torch {torch.version}, and {oldest} is the oldest that works here")
environment, packages = map(pathlib.Path, sys.argv[1:])
(packages / "system-torch.pth").write_text(f"{torch.locate_file('')}\n")
(environment / "system.txt").write_text(f"torch=={torch.version}\n")  # pip must not put another one beside it
print(f"Using torch {torch.version} of {sys.executable}.")
END
    exit ;;
  cpu)
    echo "Asking for PyTorch's wheels for CPUs."
    probe='import os, threading, urllib.request as u
limit = threading.Timer(8, os._exit, [1]); limit.daemon = True; limit.start()
u.urlopen("'$CPU_WHEELS'/torch/", timeout=5)'
    if "$python" -c "$probe" 2> /dev/null; then
      echo "Installing PyTorch for CPUs (about 200 MB)."
      set -- --extra-index-url "$CPU_WHEELS"
    elif [ -n "${fallback-}" ]; then
      echo "They cannot be reached: installing the package index's torch, which on Linux brings the CUDA libraries"
      echo "(up to 2.7 GB, 5 GB on disk)."
      set --
    else
      echo "TORCH=cpu: $CPU_WHEELS cannot be reached; leave TORCH out to install the package index's torch" >&2
      exit 1
    fi ;;
  cuda)
    echo "Installing PyTorch (on Linux with the CUDA libraries: 2.7 GB, 5 GB on disk)."
    set -- ;;
  *)
    echo "TORCH is auto, cpu, cuda or system, not '$choice'" >&2
    exit 2 ;;
esac
echo "First the libraries of the server (about 120 MB)."
awk '/^[a-z]/ {keep = !/^(torch==|triton==|cuda-|nvidia-)/} keep' .ci/serve.txt > "$VENV/libraries.txt"
sed -n '/^[a-z]/s/ *\\$//p' .ci/serve.txt > "$VENV/versions.txt"
"$python" -m pip --disable-pip-version-check install --require-hashes --no-deps --requirement "$VENV/libraries.txt"
"$python" -m pip --disable-pip-version-check install --constraint "$VENV/versions.txt" "$@" torch
