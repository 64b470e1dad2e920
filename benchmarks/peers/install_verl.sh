#!/usr/bin/env bash
# Builds .peers/verl, an environment that has verl 0.9.1: seconds and some 50 MB, since everything heavy is borrowed.
#
#   bash benchmarks/peers/install_verl.sh [python]
#
# torch, Ray and what else is there already come from the given Python (burnish's own, .venv/bin/python, by default; on a GPU
# machine one that has vLLM), which is left as it is: a .pth file puts its packages behind those installed here. verl trains on GPUs
# only; on a CPU this environment serves to read its configuration.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.peers/verl
python=${1:-.venv/bin/python}
"$python" -m venv --clear "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
# What verl asks for and burnish has no use for. Without dependencies: pip must not touch what is borrowed.
"${pip[@]}" --no-deps verl==0.9.1 TransferQueue==0.1.11 codetiming==1.4.0 pylatexenc==2.11 dill==0.4.1 orjson pyzmq msgspec
"$folder/bin/python" -c 'import verl; print("verl", verl.__version__)'
touch "$folder/.done"
