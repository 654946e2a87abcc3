#!/bin/sh
# Install the torch that suits this machine, with pip's progress bar: it is by far the largest download.
# Usage: PYTHON=... BIN=... CONSTRAINTS=... install_torch.sh auto|cpu|cuda|system
set -eu
CPU_WHEELS=https://download.pytorch.org/whl/cpu
choice=$1

if [ "$choice" = auto ]; then
  choice=cuda
  if [ "$(uname)" = Linux ] && ! [ -e /proc/driver/nvidia/version ] && ! [ -e /dev/nvidiactl ] && ! [ -e /dev/dxg ]; then
    choice=cpu
  fi
fi

case $choice in
  system) # a path file, so that the environment sees the torch of PYTHON, and whatever else PYTHON has
    "$PYTHON" - "$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'END'
import importlib.metadata as metadata, pathlib, sys

try:
    torch = metadata.distribution("torch")
except metadata.PackageNotFoundError:
    sys.exit(f"TORCH=system uses the torch of {sys.executable}, which has none: say PYTHON=... or leave TORCH out")
pathlib.Path(sys.argv[1], "system-torch.pth").write_text(f"{torch.locate_file('')}\n")
print(f"Using torch {torch.version} of {sys.executable}.")
END
    exit ;;
  cpu)
    if "$BIN/python" -c "import urllib.request as u; u.urlopen('$CPU_WHEELS/torch/', timeout=5)" 2> /dev/null; then
      echo "Installing PyTorch for CPUs (about 200 MB)."
      set -- --extra-index-url "$CPU_WHEELS"
    else
      echo "PyTorch's own wheels for CPUs cannot be reached: installing the package index's torch, which on Linux"
      echo "brings the CUDA libraries (up to 2.7 GB, 5 GB on disk)."
      set --
    fi ;;
  cuda)
    echo "Installing PyTorch (on Linux with the CUDA libraries: 2.7 GB, 5 GB on disk)."
    set -- ;;
  *)
    echo "TORCH is auto, cpu, cuda or system, not '$choice'" >&2
    exit 2 ;;
esac
exec "$BIN/python" -m pip --disable-pip-version-check install --constraint "$CONSTRAINTS" "$@" torch
