#!/usr/bin/env bash
# The clients of the field that the tests start, in an environment of their own: .venv/clients, 650 MB. It sees our
# packages too (torch, transformers), so that nothing large is installed twice. Does nothing where it is up to
# date. Without them the tests in tests/whole/test_clients.py fail. Where there is npm, the AI SDK is installed too.
set -euo pipefail

here=$(dirname "$0")
python=${1:-$here/../.venv/bin/python}
ours=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
home=$("$python" -c 'import sys; print(sys.prefix)')/clients

if ! cmp --silent "$here/clients.txt" "$home/installed"; then
    echo "Installing clients for the tests into $home" >&2
    rm -rf "$home"
    "$python" -m venv "$home"
    theirs=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$ours" > "$theirs/ours.pth"
    if ! "$home/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/clients.txt"; then
        echo "The clients in tests/clients.txt can not be installed. They need PyPI, and 600 MB in $home." >&2
        exit 1
    fi
    cp "$here/clients.txt" "$home/installed"
fi
if command -v npm > /dev/null && ! cmp --silent "$here/ai_sdk/package-lock.json" "$home/ai_sdk/installed"; then
    rm -rf "$home/ai_sdk"
    mkdir -p "$home/ai_sdk"
    cp "$here"/ai_sdk/package*.json "$home/ai_sdk"
    if npm ci --silent --prefix "$home/ai_sdk"; then
        cp "$here/ai_sdk/package-lock.json" "$home/ai_sdk/installed"
    else
        echo "The AI SDK can not be installed here: tests/server/test_ai_sdk.py will skip what needs it." >&2
    fi
fi
