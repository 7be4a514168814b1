#!/usr/bin/env bash
# SGLang in an environment of its own, as far as it runs without a GPU: its tree, its host pools, its controller
# and its storage. 2.2 GB. `make engines` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.venv/engines/sglang-${1:-0.5.23}
[ -e "$folder/installed" ] && exit 0
rm -rf "$folder"
python3 -m venv "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 numpy orjson psutil pybase64 requests triton==3.6.0 packaging pillow starlette fastapi \
    msgspec pydantic pyzmq tqdm IPython aiohttp transformers==5.12.1 dill apache-tvm-ffi==0.1.11 \
    sentencepiece loguru gguf xxhash blake3 openai==2.6.1 partial_json_parser einops setproctitle \
    prometheus-client uvloop uvicorn python-multipart zstandard pytest pytest-timeout typer
$pip --no-deps "sglang==${1:-0.5.23}" compressed-tensors torchvision==0.28.0 xgrammar
touch "$folder/installed"
