#!/usr/bin/env bash
# vLLM with one of our stores behind its CPU tier. Run: examples/vllm/serve.sh MODEL [options of vllm serve]
set -euo pipefail
: "${STORE:=shared:///var/cache/kv?size=200GiB}" # what is kept for the next start
: "${HOST_BYTES:=64000000000}"                    # vLLM's CPU tier: it is in /dev/shm
exec vllm serve "$@" --enable-prompt-tokens-details --kv-transfer-config '{
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": '"$HOST_BYTES"',
        "secondary_tiers": [{"type": "Tier", "module_path": "tiercel.integrations.vllm",
                             "store": "'"$STORE"'"}]}}'
