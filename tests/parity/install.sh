#!/usr/bin/env bash
# Puts what burnish's numbers are compared with into .peers/parity: verl and TRL, as they are on PyPI (17 MB, half a minute).
#
#   bash tests/parity/install.sh [python]
#
# Their wheels, and what they import that burnish does not have: `codetiming` and `orjson` for verl, `datasets` and what that needs
# for TRL. torch, transformers and the rest are those that burnish itself is tested with. verl's wheel also holds a package called
# `tests`, which would hide this repository's.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.peers/parity
rm -rf "$folder"
"${1:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    verl==0.9.1 trl==1.16.0 codetiming==1.4.0 orjson==3.13.0 \
    datasets==5.2.0 multiprocess dill==0.4.1 xxhash pandas python-dateutil six pytz tzdata
rm -rf "$folder/tests" "$folder/scripts" "$folder/bin"
touch "$folder/.done"
