#!/usr/bin/env bash
# The clients of the field that the tests start, in an environment of their own: .venv/clients, 650 MB. It sees our
# packages too (torch, transformers), so that nothing large is installed twice. Does nothing where it is up to
# date. Where they can not be installed, their tests are skipped.
set -euo pipefail

here=$(dirname "$0")
python=${1:-$here/../.venv/bin/python}
ours=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
home=$("$python" -c 'import sys; print(sys.prefix)')/clients

if cmp --silent "$here/clients.txt" "$home/installed"; then
    exit 0
fi
echo "Installing clients for the tests into $home" >&2
rm -rf "$home"
"$python" -m venv "$home"
theirs=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$ours" > "$theirs/ours.pth"
if "$home/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/clients.txt"; then
    cp "$here/clients.txt" "$home/installed"
else
    echo "They can not be installed here: tests/whole/test_clients.py will skip what needs them." >&2
fi
