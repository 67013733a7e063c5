# Every target but test-gpu and gpu-evidence sets up what it needs in .venv, from nothing but python3.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS ?= .ci/constraints.txt
DEMO ?= runs/demo

# Ray starts many Python processes; without cached bytecode each recompiles torch and Ray (3 to 4 times slower).
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(if $(TMPDIR),$(TMPDIR),/tmp)/ray_adascale-pycache

.PHONY: help setup demo quick test test-ray test-pool test-simulated test-plain test-docs test-release test-gpu gpu-evidence test-all test-oldest test-clients-newest docs check format bench \
	dist clean

.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  %-20s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## .venv with all that development needs

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# One more extra of pyproject.toml in the same environment.
$(VENV)/.installed-%: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[$*]'
	touch $@

demo: $(STAMP)  ## search at batch 8, then the same schedule on two workers, then the comparison table
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh $(DEMO)

# Two parts of the drawn cases, 30 each.
DRAWN = tests/model/test_model.py::test_runs_agree_with_the_literal_model
quick: $(STAMP)  ## 60 drawn whole runs, the architecture, and one folder of tests, in two minutes: make quick ROOM=optim
	$(BIN)/python -m pytest -q -m "not slow" $(ROOM:%=tests/%) tests/project/test_architecture.py '$(DRAWN)[0]' '$(DRAWN)[1]'

test: $(STAMP)  ## all tests but the slow ones and those of docs and benchmarks, in four lanes, two at a time; runs all, then fails
	$(MAKE) --keep-going --jobs=2 --output-sync=target test-ray test-pool test-simulated test-plain

# Each lane imports only what it needs (tests/conftest.py).
LANE = $(BIN)/python -m pytest -q -m "not slow" --lane

test-ray: $(STAMP)  ## the tests that start Ray, which waits for processes most of the time
	$(LANE)=ray

test-pool: $(STAMP)  ## the tests that run functions on gloo processes
	$(LANE)=pool

test-simulated: $(STAMP)  ## the tests on the simulated GPU, which this compiles first where there is a C++ compiler
	$(LANE)=simulated

test-plain: $(STAMP)  ## the tests that need none of these
	$(LANE)=plain

test-docs: $(STAMP)  ## pages, examples and benchmarks, run small
	$(LANE)=docs

test-release: $(STAMP)  ## kept studies, pictures, benchmark scripts and one example, also the slow ones: before a release; test-docs has them where their files change
	$(BIN)/python -m pytest -q --lane=release

# The Python that is given, else that of .venv, else python3. It needs torch, numpy, pytest and pytest-timeout, and no Ray; nothing is
# installed, because a machine with a GPU usually has a torch that fits it.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

test-gpu:  ## what a first session on a GPU must settle, in ten minutes; PYTHON=python3 names the Python; results in runs/gpu
	$(GPU_PYTHON) benchmarks/gpu_evidence.py --parts tests models --minutes 10

gpu-evidence:  ## what a quarter of an hour of a GPU is used for; PYTHON=python3, GPUS=2, MINUTES=12, RESUME=1; results in runs/gpu
	$(GPU_PYTHON) benchmarks/gpu_evidence.py --gpus $(or $(GPUS),1) --minutes $(or $(MINUTES),12) $(if $(RESUME),--resume)

test-all: $(STAMP)  ## every test, also the slow ones, one after the other
	$(BIN)/python -m pytest -q

.ci/constraints-oldest.txt: .ci/constraints.txt
	sed 's/^torch==.*/torch==2.11.0/' $< > $@

# Not part of CI: torch of that version, as pip finds it, brings several GB of CUDA libraries along.
test-oldest:  ## everything but the slow tests on the oldest torch that is supported, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.ci/constraints-oldest.txt

# Not part of CI: what breaks here breaks for users next week. Everything but these clients is as constrained.
.ci/constraints-clients-newest.txt: .ci/constraints.txt
	grep -v -E '^(accelerate|lightning|transformers)==' $< > $@

test-clients-newest: .ci/constraints-clients-newest.txt  ## the clients' tests on the newest Lightning, transformers and Accelerate, in .venv-newest
	rm -rf .venv-newest
	$(MAKE) setup VENV=.venv-newest CONSTRAINTS=$<
	.venv-newest/bin/pip list --disable-pip-version-check | grep -E '^(accelerate|lightning|transformers) '
	.venv-newest/bin/python -m pytest -q tests/integrations

# -n: an unresolved reference is a warning; -W: a warning is an error.
docs: $(VENV)/.installed-docs  ## the documentation site in build/docs, and the generated parts of its pages
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/columns.py
	$(BIN)/python docs/layers.py
	PYTHONPATH=$(CURDIR) $(BIN)/python -m sphinx -n -W --keep-going --quiet -b html -c docs -d build/doctrees . build/docs
	@echo "Open build/docs/index.html"

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## lint and format, with corrections
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## step-time overhead against DDP, in one interleaved run
	$(BIN)/python benchmarks/overhead.py

dist: $(VENV)/.installed-release  ## the wheel and the sdist in dist/, built and checked
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	build/dist/bin/pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cd build/dist && bin/python -c "import ray_adascale; print('wheel of', ray_adascale.__version__, 'imports')"

clean:  ## remove environments, runs and everything that was built
	rm -rf $(VENV) .venv-oldest .venv-newest runs build dist *.egg-info
