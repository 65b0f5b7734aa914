# The two commands of the README: `make demo` and `make test`. `make env` is the only installer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard prefetchd/null_device/csrc/*.h prefetchd/null_device/csrc/*/* prefetchd/job_runner/*.c)
# DeepGEMM's older cache line, beside the newer one in the environment; tests reach it by PYTHONPATH.
OLD_LINE := .lines/deep_gemm-0.1.7
# A second Triton, whose cache differs in every way this project cares about: launchers, ptxas, result files.
OTHER_TRITON := .lines/triton-3.6.0
# The oldest DSL whose objects an engine can load.
OTHER_CUTE := .lines/cutlass-dsl-4.4.2
DEMO_CACHE := $(CURDIR)/build/demo-cache
# A whole engine pins torch, Triton and the CuTe DSL to versions of its own: 9 GB, and no part of CI.
VLLM := .vllm
VLLM_VERSION := 0.33.0

.PHONY: env demo test lint test-slow chaos bench bench-gpu clean env-vllm test-vllm test-vllm-all

env: $(VENV)/.installed $(OLD_LINE)/.installed $(OTHER_TRITON)/.installed $(OTHER_CUTE)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deep-gemm,triton,dev]'
	# fla-core's metadata wants transformers; its kernels need only these two.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt fla-core einops
	# mamba_ssm's Triton kernels alone: without its CUDA extensions, and its metadata wants transformers too.
	$(BIN)/pip install --quiet --disable-pip-version-check setuptools wheel packaging
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(BIN)/pip install --quiet --disable-pip-version-check \
	    --no-deps --no-build-isolation -c constraints.txt mamba-ssm
	# The DSL's metadata brings the libraries of CUDA 12, and FlashInfer's another torch: what they need is named.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
	    nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core \
	    nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi flashinfer-python quack-kernels
	$(BIN)/pip install --quiet --disable-pip-version-check protobuf requests tabulate tqdm nvidia-ml-py ninja
	touch $@

$(OLD_LINE)/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OLD_LINE) \
	    sgl-deep-gemm==0.1.7 apache-tvm-ffi==0.1.11
	touch $@

$(OTHER_TRITON)/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHER_TRITON) \
	    triton==3.6.0
	touch $@

$(OTHER_CUTE)/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHER_CUTE) \
	    nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2
	touch $@

demo: env
	DG_JIT_CACHE_DIR=$(DEMO_CACHE) $(BIN)/prefetchd warm --target h200 --provider deep_gemm \
	    --model examples/models/deepseek-v3.json --tp 8

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: env lint
	$(BIN)/pytest -m "not slow" tests/unit
	$(BIN)/pytest -m "not slow" tests/null tests/gpu $(PYTEST)

test-slow: env
	$(BIN)/pytest -m slow $(PYTEST)

# Kills one part of a node after another, a hundred times; needs root for the small disk it fills.
chaos: env
	$(BIN)/python tests/null/chaos.py --rounds 100 --json docs/results/chaos.json

env-vllm: $(VLLM)/.installed

$(VLLM)/.installed: pyproject.toml setup.py $(NATIVE)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm==$(VLLM_VERSION) 'setuptools>=77' wheel \
	    pytest hypothesis
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -e . --no-build-isolation
	touch $@

# A whole vLLM on the null device, from its first start to one that compiles nothing; up to 40 minutes.
test-vllm: env-vllm
	$(VLLM)/bin/pytest -rP tests/vllm $(PYTEST)

test-vllm-all: env-vllm
	PREFETCHD_TEST_VLLM_ALL=1 $(VLLM)/bin/pytest -rP tests/vllm $(PYTEST)

# What needs no GPU; each run is appended to docs/results, then plots and documents are written from there.
bench: env
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/plots.py
	$(BIN)/python bench/readme.py

# Tables 1 to 3 on the GPU of this machine, about two hours: most of it is what engines compile themselves.
# A bar that is missed (status 1) is said and does not end it: the figures are written down either way.
bench-gpu: env
	$(BIN)/python bench/deep_gemm_traffic.py || test $$? -eq 1
	mkdir -p build
	$(BIN)/python bench/first_contact.py --winners build/winners.jsonl || test $$? -eq 1
	$(BIN)/python bench/traffic_replay.py --winners build/winners.jsonl || test $$? -eq 1
	$(BIN)/python bench/plots.py
	$(BIN)/python bench/readme.py

clean:
	rm -rf build dist *.egg-info
