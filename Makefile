# `make train` installs torch and the extra `train`; all other targets install everything. Both need Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
NEWEST ?= .venv-newest
TITAN ?= .venv-titan
BIN := $(VENV)/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test test-all test-oldest test-newest test-titan lint docs bench setup clean
.DELETE_ON_ERROR:
# Tests start many processes. Without cached bytecode, each compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

train: $(VENV)/.train-installed  ## train a Kalman language model on real text, on this machine; ARGS="--help" for the options
	$(BIN)/kalmix train $(ARGS)

test: setup  ## run the tests, without the slow ones; ARGS="-k laws" for some
	$(BIN)/pytest -n 2 --dist worksteal --durations 20 $(ARGS)

# Processes of the tests compile by themselves, since each process of a pool of compilers would import torch again.
test-all: $(VENV)/.clients-installed  ## run the slow tests too; ARGS="-m slow" for these alone
	TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow" $(ARGS)

test-oldest: $(OLDEST)/.installed  ## run the tests on the oldest supported torch and transformers; installs 4 GB
	$(OLDEST)/bin/pytest -n 2 --dist worksteal $(ARGS)

test-newest: $(NEWEST)/.installed  ## run the tests on the newest torch, Triton and transformers; installs 5 GB
	$(NEWEST)/bin/pytest -n 2 --dist worksteal $(ARGS)

test-titan: $(TITAN)/.installed  ## test training by torchtitan, which needs older packages than the other tests
	$(TITAN)/bin/pytest -n 2 -m "slow or not slow" tests/distributed/test_titan.py $(ARGS)

# pyright finds an installed package by the python of PATH.
define TYPED
import json, sys
known = json.load(sys.stdin)["typeCompleteness"]["completenessScore"]
print(f"{known:.1%} of public symbols have known types; at least 95% are needed")
sys.exit(known < 0.95)
endef
export TYPED

lint: setup  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	PATH="$(abspath $(BIN)):$$PATH" pyright --verifytypes kalmix --ignoreexternal --outputjson | $(BIN)/python -c "$$TYPED"

docs: $(VENV)/.docs-installed  ## build the documentation site into build/site; fails on a broken link or example
	$(BIN)/python docs/tools/build.py $(ARGS)

$(VENV)/.clients-installed: $(VENV)/.installed
	$(PIP) -e '.[clients]'
	touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

bench: setup  ## time every kernel on this machine and write a dated file under bench/results
	$(BIN)/python -m kalmix_bench.perf.ops --output bench/results $(ARGS)

setup: $(VENV)/.installed

# torch first and pinned: an unpinned one would bring gigabytes of CUDA to a machine without a GPU.
$(VENV)/.torch-installed: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kalmix needs Python >= 3.11; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.train-installed: $(VENV)/.torch-installed pyproject.toml
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/.installed: $(VENV)/.torch-installed pyproject.toml bench/pyproject.toml
	$(PIP) -e '.[dev]' -e './bench[baselines]'
	touch $@ $(VENV)/.train-installed

$(OLDEST)/.installed: pyproject.toml bench/pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check torch==2.11.0 transformers==5.17.0 'numpy<2.4' -e '.[dev]' -e './bench[baselines]'
	touch $@

# numpy below 2.4 for Triton's interpreter
$(NEWEST)/.installed: pyproject.toml bench/pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade torch 'numpy<2.4' -e '.[dev]' -e './bench[baselines]'
	touch $@

$(TITAN)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TITAN)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[titan,triton]' pytest pytest-xdist
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TITAN) build dist .pytest_cache .ruff_cache
