# Every target sets up what it needs in .venv, from nothing but python3.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO ?= runs/demo

# Ray starts many Python processes; without cached bytecode each recompiles torch and Ray (3 to 4 times slower).
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(if $(TMPDIR),$(TMPDIR),/tmp)/ray_adascale-pycache

.PHONY: setup demo test test-all check format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## search at batch 8, then the same schedule on two workers, then the comparison table
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh $(DEMO)

test: $(STAMP)  ## everything but the slow tests
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -q

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## step-time overhead against DDP, in one interleaved run
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) runs build dist *.egg-info
