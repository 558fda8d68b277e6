# Everything a person or CI runs. `make demo` and `make test` work from the first line
# on a fresh machine with Python 3.11 or newer and make.

# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
# Installed first, alone: an unpinned torch would bring gigabytes of CUDA libraries.
# The default takes a CPU build where pip finds one; on other machines point pip at
# PyTorch's CPU index (PIP_EXTRA_INDEX_URL) or name another version here.
TORCH  ?= torch==2.13.0
# cpu, cuda or cuda13: the Mooncake wheel. Exactly one.
EXTRA  ?= cpu
# The same for `make gpu-check` on a machine with a CUDA device; empty: what torch was built for.
GPU_EXTRA ?=
PYTEST_ARGS ?=
# Processes of the tests; each runs whole files. Three for two cores: what a test waits for (a
# start, a deadline, a silence) is half of its time.
# (nproc would take OMP_NUM_THREADS for the number of cores.)
JOBS   ?= $(shell echo $$(( ($$(env -u OMP_NUM_THREADS nproc) * 3 + 1) / 2 )))
# Of those that start services: each has one or two, of four processes and more. (With three
# files at a time two tests of 254 failed that way, once: both waited for what may not come first.)
FEW    := $(if $(filter 0 1,$(JOBS)),$(JOBS),2)
CHAOS_ARGS  ?= --minutes 60
SOAK_ARGS   ?= --requests 10000
STORM_ARGS  ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.epd-ready
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input --retries 5
# pip would compile torch and transformers on one core for half a minute: afterwards, on all of them.
INSTALL := $(PIP) install -q --no-compile -c constraints.txt
# Tests share the machine's cores between many processes: one thread each.
export OMP_NUM_THREADS ?= 1
# Containers often set it. Each process would compile our sources anew, pytest all of the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-cases test-parity test-e2e test-chaos chaos soak storm gpu-check triton contract load-client fuzz images bench-gateway bench-overlap bench-growth bench-interference soak-gateway check format protos parity clean

help: ## show this help
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'

setup: $(READY) ## virtual environment with everything, and the system libraries of Mooncake

$(READY): pyproject.toml constraints.txt deploy/system_libraries.sh
	@test -n "$(PYTHON)" || { echo "make setup: no Python 3.11 or newer found; install one, or say PYTHON=/path/to/python3" >&2; exit 1; }
	bash deploy/system_libraries.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -e ".[$(EXTRA),dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages hold old Python
	$(BIN)/epd doctor $(foreach port,http grpc membership,--set gateway.$(port)_port=0)
	@touch $@

demo: $(READY) ## start all services, ask about a picture, show the answer and where the time went
	$(BIN)/python -m bench.demo

# Files in the order of the folders and of their names: xdist would rather begin with files of many
# tests, and the long ones, which have few, would be last.
PYTEST := $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder -m "not long"
# Gateways over scripted stages: they hurt nobody, so they run beside each other.
SCRIPTED := $(wildcard tests/e2e/test_gateway_*.py) tests/e2e/test_client.py
# Real processes over Mooncake.
REAL := tests/e2e $(SCRIPTED:%=--ignore=%)

# Three runs for all parts: every process of a run imports and collects for seconds, and at the end
# of a run cores wait for the last file. What computes comes first (parity), and the two minutes of
# chaos, which are long and wait.
test: test-unit ## all tests: unit, parity, end to end, real cases, chaos
	$(PYTEST) -n $(JOBS) tests/parity $(SCRIPTED) tests/cases tests/contract $(PYTEST_ARGS)
	$(PYTEST) -n $(FEW) tests/chaos $(REAL) $(PYTEST_ARGS)

test-unit: $(READY) ## fast tests, no processes
	$(PYTEST) -n $(JOBS) tests/unit $(PYTEST_ARGS)

test-cases: $(READY) ## faults met in public with systems of this kind (docs/cases.md), and real clients
	$(PYTEST) -n $(JOBS) tests/cases tests/contract $(PYTEST_ARGS)

test-parity: $(READY) ## numbers against transformers
	$(PYTEST) -n $(JOBS) tests/parity $(PYTEST_ARGS)

test-e2e: $(READY) ## real processes over Mooncake, and the gateway over scripted stages
	$(PYTEST) -n $(JOBS) $(SCRIPTED) $(PYTEST_ARGS)
	$(PYTEST) -n $(FEW) $(REAL) $(PYTEST_ARGS)

test-chaos: $(READY) ## real processes, hurt on purpose
	$(PYTEST) -n $(FEW) tests/chaos $(PYTEST_ARGS)

test-long: $(READY) ## what `make test` leaves out for time: more families, topologies and fault points
	$(BIN)/python -m pytest -q -m long --hypothesis-profile=explore tests/parity tests/e2e tests/chaos $(PYTEST_ARGS)

chaos: $(READY) ## an hour of checked traffic over a service that is hurt all the time (CHAOS_ARGS="--minutes 5")
	$(BIN)/python -m tests.chaos.run $(CHAOS_ARGS)

soak: $(READY) ## 10,000 requests, three of ten left by their clients; does anything grow?
	$(BIN)/python -m tests.chaos.soak $(SOAK_ARGS)

storm: $(READY) ## what clients that cancel cost those that stay: throughput with the storm over without
	$(BIN)/python -m tests.chaos.storm $(STORM_ARGS)

gpu-check: $(READY) ## what only a CUDA device shows (docs/gpu.md); without one: not run, exit code 3
	$(BIN)/python -m deploy.mooncake_build --extra "$(GPU_EXTRA)"
	$(BIN)/python -m bench.gpu_check

triton: $(READY) ## the GPU's attention kernel on the CPU, by Triton's interpreter (brings 290 MB along)
	$(PIP) install -q "triton>=3.4"
	$(BIN)/python -m pytest -q tests/unit/test_gpu_attention.py tests/unit/test_gpu_graphs.py $(PYTEST_ARGS)

contract: $(READY) ## the API, by clients that nobody here wrote, schemathesis as well (brings it along)
	$(PIP) install -q "schemathesis>=4,<5"
	$(BIN)/python -m pytest -q tests/contract $(PYTEST_ARGS)

load-client: $(READY) ## a load client (aiperf, in a virtual environment of its own) finishes its runs
	test -x .venv-aiperf/bin/aiperf || { $(PYTHON) -m venv .venv-aiperf && .venv-aiperf/bin/pip install -q "aiperf==0.13.0"; }
	$(BIN)/python -m pytest -q -s tests/contract/test_aiperf.py $(PYTEST_ARGS)

fuzz: $(READY) ## 10,000 mutated requests and picture files: no 5xx, no hang, no growth
	$(BIN)/python -m tests.cases.fuzz --examples 10000

images: $(READY) ## every file of a folder's manifest through the service (MANIFEST=folder)
	@test -f "$(MANIFEST)/manifest.json" || { echo "make images: MANIFEST=folder, with a manifest.json in it" >&2; exit 1; }
	EPD_MANIFEST="$(abspath $(MANIFEST))" $(BIN)/python -m pytest -q tests/cases/test_manifest.py $(PYTEST_ARGS)

bench-gateway: $(READY) ## what the gateway adds to a scripted engine, and 1,000 streaming clients of it
	$(BIN)/python -m bench.gateway.overhead
	$(BIN)/python -m bench.gateway.streams --clients 1000 --tokens 64 --rate 4
	$(BIN)/python -m bench.gateway.streams --clients 64 --tokens 400 --rate 20

bench-overlap: $(READY) ## 4 pictures, with and without overlap (CHECKPOINT=folder; about 8 minutes with 0.5 B)
	$(BIN)/python -m bench.overlap $(CHECKPOINT) --rounds 7

bench-growth: $(READY) ## cost over prompt length, pictures, streams, beside theory (CHECKPOINT=folder)
	$(BIN)/python -m bench.growth $(CHECKPOINT) bench-out/growth --minutes 10

bench-interference: $(READY) ## what image prompts do to running answers, split and monolithic (CHECKPOINT=folder)
	$(BIN)/python -m bench.interference $(CHECKPOINT) bench-out/interference --minutes 12

soak-gateway: $(READY) ## 50,000 cancelled gRPC streams, 20,000 to a dead server: nothing grows
	$(BIN)/python -m bench.gateway.soak

parity: test-parity ## same as test-parity

check: $(READY) ## formatting, lint, types, import contracts, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/python -m deploy.protos --check

format: $(READY) ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(READY) ## regenerate the committed stubs
	$(BIN)/python -m deploy.protos

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
