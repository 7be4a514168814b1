#!/usr/bin/env bash
# The servers and libraries of the system that the tests need. Does nothing where everything is there.
#
#   redis-server   tests of the redis store run a real one
#   libibverbs1    Mooncake's client and master are linked with it, also where there is no RDMA;
#   libcurl4       and with these, which most machines have
#   libnuma1
#   iproute2       two servers in two networks, between which the link is cut
#   chromium       opens the server's page (about 110 MB to download, 420 MB installed)
#   prometheus     scrapes a server, and checks deploy/: its programs alone, in .venv/prometheus (95 MB), because
#                  the installed package is a service that runs
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

home=$(dirname "$0")/../.venv/prometheus
prometheus=no
command -v prometheus > /dev/null && command -v promtool > /dev/null || [[ -x $home/usr/bin/promtool ]] ||
    prometheus=missing

if [[ ${#missing[@]} == 0 && $prometheus == no ]]; then
    exit 0
fi
if ! command -v apt-get > /dev/null; then
    echo "The tests need ${missing[*]} (names of Debian's packages), Prometheus: $prometheus. There is no apt-get." >&2
    echo "Install them with this system's own tool: redis-server, prometheus and promtool in the PATH, and the" >&2
    echo "libraries." >&2
    exit 1
fi

as_root=()
if [[ $(id -u) != 0 ]]; then
    if ! command -v sudo > /dev/null; then
        echo "The tests need ${missing[*]}, Prometheus: $prometheus. As root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "Installing ${missing[*]}; Prometheus: $prometheus" >&2
"${as_root[@]}" apt-get update -qq
if ((${#missing[@]} > 0)); then
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
fi
if [[ $prometheus == missing ]]; then
    folder=$(mktemp -d)
    (cd "$folder" && apt-get download -qq prometheus)
    (cd "$folder" && apt-get download -qq promtool 2> /dev/null) || true # older Debians have it in the same package
    for package in "$folder"/*.deb; do dpkg-deb -x "$package" "$home"; done
    rm -r "$folder"
fi
