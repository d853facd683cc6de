# Two commands do everything: `make annotate` runs the demo job, `make test` the tests. `make help` lists the rest.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= demo
UV_VERSION := 0.13.8
LOCK := requirements/cpu.lock
OTHER_PYTHON ?= python3.12
# The unit tests that need neither torch nor vLLM.
PURE := tests/unit $(addprefix --ignore tests/unit/,vllm_ext transfer)

# Many containers set it: then each of the hundred processes of a job or a test would compile again what it imports,
# which takes longer than the import (vLLM: 19 s and 15 s).
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup annotate compare check pure-tests test all-tests test-long test-python test-versions test-elsewhere \
	nightly coverage faults histories parity-full peers llama audit wheel lint docs lock clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/ready  ## Make .venv from the pinned lock and fetch Delta's jars

$(VENV)/ready: $(LOCK) pyproject.toml tools/setup.sh tools/configure_spark.py
	@PYTHON="$(PYTHON)" VENV="$(VENV)" LOCK="$(LOCK)" UV_VERSION="$(UV_VERSION)" bash tools/setup.sh
	@touch $@

annotate: $(VENV)/ready  ## Annotate the demo table with the demo model
	@bash tools/annotate_demo.sh "$(BIN)" "$(DEMO)"

compare: $(VENV)/ready  ## Compare stock vLLM with PipeMax on a part of the demo table
	@mkdir -p logs; $(BIN)/python lab/bench/compare_policies.py 2>logs/compare.log || { code=$$?; tail -5 logs/compare.log; exit $$code; }

check: $(VENV)/ready  ## Lint, types, import contracts and the pure tests
	@$(MAKE) --no-print-directory -j 2 lint pure-tests

test: $(VENV)/ready  ## Lint, types, import contracts, documentation site and all tests (order: tests/running_order.py)
	@begin=$$(date +%s); $(MAKE) --no-print-directory -j 2 lint docs all-tests; status=$$?; \
	echo "make test: status $$status after $$(($$(date +%s) - begin)) s"; exit $$status

pure-tests: $(VENV)/ready
	@$(BIN)/python -m pytest -q -n 2 $(PURE)

# Two at a time on two cores: with three, tests that wait for heartbeats fail under their load.
all-tests: $(VENV)/ready
	@$(BIN)/python -m pytest --durations 25 -n 2 --dist loadscope --no-loadscope-reorder

test-long: $(VENV)/ready  ## Nightly runs, drivers killed in mid-work, YARN, a large executor, and variants of what make test shows
	@$(BIN)/python -m pytest -m long

test-versions: $(VENV)/ready  ## The wheel on Spark 4.0, 4.1 and 4.2, each in a thin environment: a quarter of an hour
	@bash tools/make_versions.sh "$(BIN)" .venv-versions
	@bash tools/test_versions.sh "$(BIN)" .venv-versions

test-python: $(VENV)/ready  ## The pure tests with another Python (OTHER_PYTHON, python3.12) in a thin environment
	@bash tools/test_python.sh "$(BIN)/uv" "$(OTHER_PYTHON)" .venv-python $(PURE)

test-elsewhere: $(VENV)/ready  ## The pure tests on one core, on busy ones, in another zone and locale, without HOME, as another user
	@DAY="$(DAY)" bash tools/test_elsewhere.sh "$(BIN)" $(PURE)

nightly: $(VENV)/ready  ## One of seven slices of the tests that are too long for make test; DAY=N chooses it
	@bash tools/nightly.sh "$(BIN)" "$(DAY)"

coverage: $(VENV)/ready  ## Which lines the pure tests and the engine server's tests run
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --cov --cov-report term:skip-covered tests/unit tests/serve

peers: $(VENV)/ready  ## Ray Data LLM and distribatch in .venv-peers, for python -m lab.bench.peers
	@bash tools/make_peers.sh "$(BIN)" .venv-peers

llama: $(VENV)/ready  ## llama-cpp-python's server in .venv-llama, compiled: for the nightly tests of endpoints
	@bash tools/make_llama.sh "$(BIN)" .venv-llama

parity-full: $(VENV)/ready  ## Every kind of engine with every load and n, and random ones, against stock vLLM
	@$(BIN)/python -m pytest -m "parity_full or not parity_full" tests/parity tests/unit/vllm_ext tests/unit/transfer

faults: $(VENV)/ready  ## Strike a job's processes at 20 random points; SEED=N repeats; ENDPOINT=1: over faulty endpoints; CASCADE=1
	@$(BIN)/python -m tests.spark.faults.$(if $(CASCADE),cascade_kills,random_kills --report lab/results/faults$(if \
		$(ENDPOINT),_endpoint).md) $(if $(ENDPOINT),--endpoint) $(if $(SEED),--seed $(SEED))

audit: $(VENV)/ready  ## Known vulnerabilities of the locked packages, where the index serves advisories
	@$(BIN)/python tools/audit.py $(BIN)/uv

# Iceberg has no release for the Spark of .venv: with ICEBERG=4.1, that environment of `make test-versions` plays them.
histories: $(VENV)/ready  ## Random histories of tables and jobs against a model: SEEDS=0-49; ICEBERG=4.1: outputs of Iceberg
	@$(if $(ICEBERG),PIPEMAX_TEST_ENGINE_PYTHON=$(CURDIR)/$(BIN)/python PYTHONPATH=$(CURDIR):$(CURDIR)/engine \
		.venv-versions/$(ICEBERG)/bin/python,$(BIN)/python) -m tests.spark.histories $(if $(ICEBERG),--iceberg) \
		--seeds $(or $(SEEDS),0-49) --report lab/results/histories.jsonl

wheel: $(VENV)/ready  ## The wheel of both sides, in dist/: what the README's install lines take
	@$(BIN)/python -m hatchling build -t wheel -d dist

# Next to tests mypy takes only what they leave of the cores: a minute of one core the first time.
lint: $(VENV)/ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@nice -n 19 $(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/shellcheck tools/*.sh deploy/databricks/*.sh
	@$(BIN)/hadolint deploy/*.Dockerfile

docs: $(VENV)/ready  ## Build the documentation site into artifacts/site; broken links and commands fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock:  ## Resolve all locks again
	@bash tools/lock.sh $(BIN)/uv

clean:  ## Remove .venv and everything the demo wrote
	@bash tools/clean.sh "$(VENV)" "$(DEMO)"
