#!/usr/bin/env bash
# Builds .peers/trl, the environment of TRL's GRPOTrainer on a CPU: a minute or two and 1.6 GB.
#
#   bash benchmarks/peers/install_trl.sh [python]
#
# torch is the CPU build, always, as in install.sh; transformers is the version that burnish itself is tested with.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.peers/trl
"${1:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
{ echo 'torch==2.13.0+cpu'; grep '^transformers==' constraints.txt; } >"$folder/constraints.txt"
"${pip[@]}" -c "$folder/constraints.txt" torch
"${pip[@]}" -c "$folder/constraints.txt" trl==1.16.0
touch "$folder/.done"
