# Everything from a fresh machine: each target first makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported; most of them never are.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# What is installed, each into the same environment: torch; the lab; all that tests and tools need.
TORCH := $(VENV)/.torch
LAB := $(VENV)/.lab
DEV := $(VENV)/.dev
# A machine that never writes bytecode would compile every module again in each of many processes.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml setup.py $(wildcard src/labo/fast/*.c)

.PHONY: demo test check bench gpu docs results soak fuzz resolve clean

demo: $(LAB)
	$(BIN)/labo demo

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV)
	$(BIN)/python -m benchmarks

# On a machine with a GPU: the kernels are tested and timed there; prints tables ready to paste.
# The first line says what the machine has, and one more what is wrong with it.
gpu: $(DEV)
	@$(BIN)/python -m benchmarks.gpu --versions
	LABO_ALL_KERNELS=1 $(BIN)/python -m pytest tests/core
	$(BIN)/python -m benchmarks.gpu

docs: $(DEV)
	$(BIN)/python -m zensical build --strict
	@echo "To read it with search: $(BIN)/python -m http.server --directory site"

# The tables and figures of docs/results.md, from results/*.csv.
results: $(DEV)
	$(BIN)/python tools/results.py

# Killed runs of every method, in one and in two processes, each compared bit by bit: half an hour.
soak: $(DEV)
	LABO_SOAK=5 $(BIN)/python -m pytest -k killed tests/lab/test_methods.py
	LABO_SOAK=1 $(BIN)/python -m pytest -k two_processes tests/lab/run/test_distributed.py tests/lab/translation tests/lab/language_modeling

# Damaged files for every reader and command, and the C kernel under sanitizers: half an hour.
fuzz: $(DEV)
	$(BIN)/python -m fuzz

# Does constraints.txt resolve for every Python, for Linux (CPU and CUDA) and macOS? Needs a network.
resolve: $(DEV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python tools/resolve.py

# torch comes first: a build of your choice that is installed here already stays (README).
$(TORCH): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools
	touch $@

$(LAB): $(TORCH) $(SOURCES)
	$(PIP) --no-build-isolation --editable .[lab]
	touch $@

$(DEV): $(TORCH) $(SOURCES)
	$(PIP) --no-build-isolation --editable .[dev]
	touch $(LAB) $@

clean:
	rm -rf $(VENV) build dist site .cache src/*.egg-info src/labo/fast/*.so
