#!/usr/bin/env bash
# The servers and libraries of the system that the tests need. Does nothing where everything is there.
#
#   redis-server   tests of the redis store run a real one
#   libibverbs1    Mooncake's client and master are linked with it, also where there is no RDMA;
#   libcurl4       and with these, which most machines have
#   libnuma1
#   iproute2       two servers in two networks, between which the link is cut
#   chromium       opens the server's page (about 110 MB to download, 420 MB installed)
set -euo pipefail

PATH="$PATH:/usr/sbin:/sbin" # ldconfig, for those who are not root

missing=()
command -v redis-server > /dev/null || missing+=(redis-server)
command -v ip > /dev/null && command -v tc > /dev/null || missing+=(iproute2)
command -v chromium > /dev/null || missing+=(chromium)
libraries=$(ldconfig -p)
[[ $libraries == *libibverbs.so.1* ]] || missing+=(libibverbs1)
[[ $libraries == *libcurl.so.4* ]] || missing+=(libcurl4)
[[ $libraries == *libnuma.so.1* ]] || missing+=(libnuma1)

if ((${#missing[@]} == 0)); then
    exit 0
fi
if ! command -v apt-get > /dev/null; then
    echo "The tests need ${missing[*]} (names of Debian's packages), and there is no apt-get here." >&2
    echo "Install them with this system's own tool: a redis-server in the PATH, and the libraries." >&2
    exit 1
fi

as_root=()
if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo > /dev/null; then
        echo "The tests need ${missing[*]}. As root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "Installing ${missing[*]}" >&2
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
