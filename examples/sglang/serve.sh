#!/usr/bin/env bash
# SGLang with a store behind its host memory: serve.sh MODEL [FOLDER] [SIZE]
# All ranks of a server, and all servers of a machine, may use the same folder. It outlives them.
set -euo pipefail
model=$1 folder=${2:-$HOME/.cache/tiercel/sglang} size=${3:-100GiB}

exec python -m sglang.launch_server --model-path "$model" --enable-hierarchical-cache \
    --hicache-mem-layout page_first_direct --hicache-io-backend direct --hicache-storage-backend dynamic \
    --hicache-storage-backend-extra-config "{
        \"backend_name\": \"tiercel\", \"module_path\": \"tiercel.integrations.sglang\",
        \"class_name\": \"HiCache\", \"interface_v1\": 1, \"store\": \"shared://$folder?size=$size\"}"
