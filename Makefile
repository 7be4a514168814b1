# The commands of this repository. They work from a fresh clone with only Python 3.11+, gcc, make and git.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE = # tests start hundreds of processes: modules are compiled once for all of them

# Without a GPU the tests run Triton's kernels in its interpreter, which they know in this version. A torch for
# CUDA asks for the Triton that it was built with, so this one is no constraint.
INTERPRETER := triton==3.6.0

.PHONY: serve test test-gpu sanitize check engines soak bench clean

.venv/installed: pyproject.toml constraints.txt setup.py src/tiercel/kernels/levels.py $(wildcard src/tiercel/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[check]"
	$(BIN)/python -c "import torch; assert torch.cuda.is_available()" 2> /dev/null || $(BIN)/pip install --quiet --no-deps $(INTERPRETER)
	touch $@

# The server on the embedded model; options in ARGS, such as ARGS="--port 9000 --host-memory 4GiB".
serve: .venv/serve
	$(BIN)/tiercel serve $(ARGS)

.venv/serve: pyproject.toml constraints.txt setup.py src/tiercel/kernels/levels.py $(wildcard src/tiercel/kernels/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# The tests start real Redis and Mooncake servers and clients of the field: the scripts install them.
test: .venv/installed
	tests/install-servers.sh
	tests/install-clients.sh
	$(BIN)/pytest -n auto --dist worksteal

# On a machine with a GPU: all tests, and those marked gpu must run.
test-gpu: .venv/installed
	TIERCEL_GPU=1 $(BIN)/pytest -n auto --dist worksteal

# On a machine with a GPU and NVIDIA's compute-sanitizer: small calls of every kernel read and write inside
# tensors, and threads do not race. Without torch's cache each tensor is an allocation: what is beyond is noticed.
SANITIZED := $(BIN)/python -m pytest tests/models/test_cuda.py tests/models/test_cuda_draft.py \
	tests/models/test_cuda_qwen3.py tests/kernels \
	-k "plain_kernels or padding or test_rings or test_cuda_draw or scratch or full_row or fp8_weights or of_transformers"
sanitize: export TIERCEL_GPU = 1
sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
sanitize: .venv/installed
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(SANITIZED)
	compute-sanitizer --tool racecheck --error-exitcode 1 $(SANITIZED)

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Our stores inside other engines: each version in an environment of its own, about 2 GB each.
ENGINES := sglang-0.5.23 sglang-0.5.22 vllm-0.32.0 vllm-0.31.0 lmcache-0.5.6 lmcache-0.5.5
engines: $(ENGINES:%=engine-%)
	$(BIN)/python -m benchmarks.engines --quick
engine-%: .venv/installed
	tests/engines/install.sh $(subst -, ,$*)
	PYTHONPATH=src:. OMP_NUM_THREADS=1 .venv/engines/$*/bin/python -m pytest --confcutdir tests/engines -o filterwarnings= tests/engines

# All cases of tests that rotate; minutes of 64 clients, hundreds of requests made from the schema for each call, thousands of kills of a file store, a Mooncake store that is too slow, hundreds of faults
# of peers, stages that are killed for ten minutes, prompts of every length; then the simulation with fresh seeds, until stopped or until one fails.
soak: .venv/installed
	TIERCEL_ALL=1 $(BIN)/pytest -n auto --dist worksteal tests/engine tests/models tests/replay
	TIERCEL_ALL=1 TIERCEL_ASKS_EACH=200 $(BIN)/pytest --timeout 3600 tests/whole/test_server.py -k "64_clients or verify"
	TIERCEL_EXAMPLES=200 $(BIN)/pytest --timeout 3600 tests/server/test_schema.py tests/whole/test_schema.py
	$(BIN)/python -m tests.storage.file.kill_loop --kills 5000
	$(BIN)/python -m tests.storage.shared.kill_loop --kills 1000
	unshare --map-root-user --net $(BIN)/python -m tests.storage.slow_holder
	$(BIN)/python -m tests.peers.soak --trials 500
	$(BIN)/python -m tests.engine.stages.kills --seconds 600
	$(BIN)/python -m tests.simulation.soak

bench: .venv/installed
	$(BIN)/python -m benchmarks.tree
	$(BIN)/python -m benchmarks.copy
	$(BIN)/python -m benchmarks.model
	$(BIN)/python -m benchmarks.engine
	$(BIN)/python -m benchmarks.store

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
