#!/bin/sh
# What holds on which vLLM release, on a machine with Python 3 and a network: see matrix.py.
set -eu
tools=$(dirname "$0")
sh "$tools/system_packages.sh" matrix
exec python3 "$tools/matrix.py" "$@"
