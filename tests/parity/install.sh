#!/usr/bin/env bash
# Puts what burnish's numbers are compared with into .peers/parity: verl and TRL, as they are on PyPI (12 MB, a few seconds).
#
#   bash tests/parity/install.sh [python]
#
# Their wheels alone: torch, transformers and the rest are those that burnish itself is tested with. `codetiming` and `orjson` are
# what verl imports beyond them. verl's wheel also holds a package called `tests`, which would hide this repository's.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.peers/parity
rm -rf "$folder"
"${1:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    verl==0.9.1 trl==1.16.0 codetiming==1.4.0 orjson==3.13.0
rm -rf "$folder/tests" "$folder/scripts" "$folder/bin"
touch "$folder/.done"
