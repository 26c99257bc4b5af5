#!/bin/sh
# Every check of the project on three of the supported vLLM releases, on a machine with Python 3 and a network: see check.py.
set -eu
tools=$(dirname "$0")
sh "$tools/system_packages.sh"
exec python3 "$tools/check.py" "$@"
