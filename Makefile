# Two commands to remember: `make demo` and `make test`. Either may come first; each needs python3 with
# pip and venv, this Makefile, and a package index. Everything is installed into $(VENV) from exact,
# hashed versions (requirements/), once, and again when those change.

PYTHON ?= python3
VENV ?= .venv
PARITY_VENV ?= .venv-parity
AOT_SITE ?= .venv-aot
DOCS_SITE ?= .venv-docs
# Test processes; compiled programs are shared within one, so more than the cores only costs.
WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
LOCK := requirements/$(PYTAG).txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(PYTAG)
SPREAD := -n $(WORKERS) --dist worksteal
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help env demo model test test-fast test-full test-isa test-settings test-web mutants lint types rooms aot aot-fast parity docs lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

env: $(STAMP) ## create the environment and install the locked versions

$(STAMP): $(wildcard requirements/py31*.txt) pyproject.toml
	@test -f "$(LOCK)" || { echo "PYTHON=$(PYTHON) is $(PYTAG): locks exist for Python 3.11 and 3.12; try make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "PYTHON=$(PYTHON): its venv module is missing; install it (Debian: apt install python3-venv) or set PYTHON" >&2; exit 2; }
	@echo "installing the locked packages into $(VENV) (once; 1 to 3 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --require-hashes -r $(LOCK)
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

demo: $(STAMP) ## fetch the default model and decode with a shared, copied and reused KV cache
	$(BIN)/pagedjax demo $(DEMO_ARGS)

model: $(STAMP) ## fetch the default model and do nothing else
	$(BIN)/pagedjax doctor --fetch-model

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy
	$(BIN)/mypy

rooms: $(STAMP) ## the rooms of pagedjax/ and the arrows between them
	$(BIN)/python tests/rooms.py

test: lint types ## lint, types and the default tests
	$(BIN)/python -m pytest $(SPREAD) $(PYTEST_ARGS)

# Both halves, the seam and the surface; what is left out is many more rows of the same tables.
FAST := tests/cache tests/engine tests/runtime tests/examples tests/kernels/test_plan.py tests/kernels/test_blocks.py
FAST += tests/models/test_decoder.py tests/models/test_config.py tests/models/test_tokenizer.py $(wildcard tests/test_*.py)

test-fast: $(STAMP) ## a subset of the tests that takes about 3 minutes
	$(BIN)/python -m pytest $(SPREAD) -m "not full and not parity and not slow and not smollm" $(FAST) $(PYTEST_ARGS)

test-isa: $(STAMP) ## the kernel and runtime tables as CPUs without AVX2 and without AVX-512 run them
	$(BIN)/python tests/environments.py isa $(SPREAD) $(PYTEST_ARGS)

test-settings: $(STAMP) ## the runner's and the decoder's tests under 64-bit types, rbg keys and a debugger of NaN
	$(BIN)/python tests/environments.py settings $(SPREAD) $(PYTEST_ARGS)

mutants: $(STAMP) ## plant faults one by one, each of which the tests beside it must notice (MUTANTS="words" of names)
	$(BIN)/python tests/mutants.py $(MUTANTS)

test-full: lint types ## the default tests and the large products
	$(BIN)/python -m pytest $(SPREAD) -m "not parity and not web" $(PYTEST_ARGS)

$(BIN)/playwright: $(STAMP) requirements/web-$(PYTAG).txt
	$(BIN)/python $(PIP_INSTALL) --require-hashes -r requirements/web-$(PYTAG).txt
	touch $@

test-web: $(BIN)/playwright ## the pages in a real Chromium (the system's: chromium on PATH)
	$(BIN)/python -m pytest -m web tests/web $(PYTEST_ARGS)

# torch and transformers stay out of $(VENV): the judges share nothing with what they judge.
$(PARITY_VENV)/.installed: requirements/parity-$(PYTAG).txt $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python $(PIP_INSTALL) --require-hashes -r $(LOCK)
	$(PARITY_VENV)/bin/python $(PIP_INSTALL) -r requirements/parity-$(PYTAG).txt
	$(PARITY_VENV)/bin/python $(PIP_INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

requirements/parity-%.txt:
	@echo "$@ is not there: the parity judges are locked for Python 3.11; try make parity PYTHON=python3.11" >&2; exit 2

parity: $(PARITY_VENV)/.installed ## compare with torch and transformers (its own environment, about 1 GB)
	$(PARITY_VENV)/bin/pagedjax doctor --fetch-model
	$(PARITY_VENV)/bin/python tests/parity/real_weights.py
	$(PARITY_VENV)/bin/python -m pytest -m parity $(PYTEST_ARGS)

# Sphinx and what executes notebooks, in a folder beside $(VENV): users have neither.
$(DOCS_SITE)/.installed-$(PYTAG): requirements/docs-$(PYTAG).txt $(STAMP)
	rm -rf $(DOCS_SITE)
	$(BIN)/python $(PIP_INSTALL) --no-deps --require-hashes --target $(DOCS_SITE) -r requirements/docs-$(PYTAG).txt
	touch $@

docs: $(DOCS_SITE)/.installed-$(PYTAG) ## the docs site in build/docs, notebooks executed (offline; DOCS_ARGS="-D nb_execution_mode=off" leaves them)
	PYTHONPATH=$(abspath $(DOCS_SITE)) $(BIN)/python -m sphinx -W -n --keep-going -q -b html $(DOCS_ARGS) docs build/docs
	@echo "open build/docs/index.html"

# The compilers of TPUs and GPUs are packages in a folder of their own, beside $(VENV) and not in it: with libtpu
# installed, jax looks for a TPU at every start. JAX_PLATFORMS keeps the CUDA plugin from looking for a driver.
$(AOT_SITE)/.installed: requirements/aot-$(PYTAG).txt $(STAMP)
	rm -rf $(AOT_SITE)
	$(BIN)/python $(PIP_INSTALL) --no-deps --require-hashes --target $(AOT_SITE) -r requirements/aot-$(PYTAG).txt
	touch $@

requirements/aot-%.txt:
	@echo "$@ is not there: the compilers are locked for Python 3.12; try make aot PYTHON=python3.12 VENV=.venv312" >&2; exit 2

AOT_TEST = JAX_PLATFORMS=cpu PYTHONPATH=$(AOT_SITE) $(BIN)/python -m pytest
AOT_TEST += tests/kernels/test_aot.py tests/kernels/test_bundles.py tests/cli/test_compile.py

aot: $(AOT_SITE)/.installed ## compile every geometry for TPUs and GPUs that are not there (about 10 minutes, 1 GB)
	$(AOT_TEST) -m "not parity" $(PYTEST_ARGS)

aot-fast: $(AOT_SITE)/.installed ## one or two programs per target, in about a minute
	$(AOT_TEST) $(PYTEST_ARGS)

# Needs uv (https://docs.astral.sh/uv) on PATH; nothing else here does.
lock: ## write requirements/ anew from pyproject.toml
	uv pip compile pyproject.toml --extra dev --generate-hashes --python-version 3.11 --no-header --no-annotate -o requirements/py311.txt
	uv pip compile pyproject.toml --extra dev --generate-hashes --python-version 3.12 --no-header --no-annotate -o requirements/py312.txt
	uv pip compile requirements/web.in --generate-hashes --python-version 3.11 --no-header --no-annotate -o requirements/web-py311.txt
	uv pip compile requirements/web.in --generate-hashes --python-version 3.12 --no-header --no-annotate -o requirements/web-py312.txt
	uv pip compile requirements/docs.in -c requirements/py311.txt --generate-hashes --python-version 3.11 --no-header --no-annotate -o requirements/docs-py311.txt
	uv pip compile requirements/docs.in -c requirements/py312.txt --generate-hashes --python-version 3.12 --no-header --no-annotate -o requirements/docs-py312.txt
	uv pip compile requirements/aot.in --no-deps --generate-hashes --python-version 3.12 --no-header --no-annotate -o requirements/aot-py312.txt

clean: ## remove environments and caches of this checkout
	rm -rf $(VENV) $(PARITY_VENV) $(AOT_SITE) $(DOCS_SITE) .venv312 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
