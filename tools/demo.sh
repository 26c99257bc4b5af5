#!/bin/sh
# The whole pipeline on SmolLM2-135M and a real vLLM, on a machine with Python 3 and a network: see demo.py.
set -eu
tools=$(dirname "$0")
sh "$tools/system_packages.sh"
exec python3 "$tools/demo.py" "$@"
