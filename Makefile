# `make demo` runs the pipeline, `make test` and `make check` do what `.ci/run` does.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Where torch comes from. On PyPI, Linux wheels bring CUDA (2 GB and more); for the CPU build:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# The newest transformers that pyproject.toml declares; constraints.txt has the oldest, which `make test` runs with.
NEWEST_TRANSFORMERS := 5.24.0

.PHONY: help setup demo test check check-transformers bench clean

help:
	@echo "make setup    create $(VENV) and install everything (once)"
	@echo "make demo     run the pipeline on this machine with an emulated 86 ms round trip"
	@echo "make test     run the tests"
	@echo "make check    formatting, lint and types"
	@echo "make bench    every schedule at every round trip (about 40 minutes; needs two quiet cores)"
	@echo "make check-transformers    the engine's tests against the newest transformers we declare"
	@echo "make clean    remove $(VENV) and caches (not the model cache)"

setup: .setup-stamp

# The stamp is younger than what decides the installation, so a second call does nothing.
.setup-stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: none found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "Could not create $(VENV): on Debian, apt-get install python3-venv"; exit 1; }
	@echo "setup: installing torch and the rest (some minutes the first time)"
	@$(PIP_INSTALL) torch -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup
	@$(BIN)/python scripts/demo.py $(DEMO_ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check-transformers: setup
	PYTHON=$(BIN)/python scripts/check_transformers.sh $(NEWEST_TRANSFORMERS)

# A stamp here too: a second call needs no package index.
.bench-stamp: .setup-stamp
	@$(PIP_INSTALL) -q -e '.[bench]'
	@touch $@

bench: setup .bench-stamp
	$(BIN)/python scripts/bench.py --results docs/results/bench.json $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .setup-stamp .bench-stamp .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
