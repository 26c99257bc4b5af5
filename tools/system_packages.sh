# Debian packages that a plain machine may lack: `sh tools/system_packages.sh` installs them as root, or names them.
#
# python3-venv makes environments; g++ and Python.h are for torch.compile, which compiles C++ on a CPU; vLLM's CPU
# kernels load libnuma.so.1. `sh tools/system_packages.sh matrix` adds what single releases of the matrix need: 0.18.1
# does not start without tcmalloc.
set -eu

missing=""
command -v python3 >/dev/null || missing="$missing python3 python3-venv python3-dev"
if [ -z "$missing" ]; then
    python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
    python3 -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        missing="$missing python3-dev"
fi
command -v g++ >/dev/null || missing="$missing g++"
[ -n "$(find /lib /usr/lib -name libnuma.so.1 -print -quit 2>/dev/null)" ] || missing="$missing libnuma1"
if [ "${1:-}" = matrix ]; then
    [ -n "$(find /lib /usr/lib -name libtcmalloc_minimal.so.4 -print -quit 2>/dev/null)" ] ||
        missing="$missing libtcmalloc-minimal4"
fi

[ -n "$missing" ] || exit 0
install="apt-get install -y --no-install-recommends$missing"
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "system_packages: not installed here:$missing. As root on Debian or Ubuntu: $install" >&2
    exit 1
fi
echo "system_packages: $install" >&2
{ apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >&2
