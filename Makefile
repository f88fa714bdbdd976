# Everything from a fresh machine: each target first makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check bench gpu docs results soak fuzz clean

demo: $(INSTALLED)
	$(BIN)/labo demo

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

# On a machine with a GPU: the kernels are tested and timed there; prints tables ready to paste.
gpu: $(INSTALLED)
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'make gpu needs a GPU'"
	LABO_ALL_KERNELS=1 $(BIN)/python -m pytest tests/core
	$(BIN)/python -m benchmarks.gpu

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# The tables and figures of docs/results.md, from results/*.csv.
results: $(INSTALLED)
	$(BIN)/python tools/results.py

# Killed runs of every method, in one and in two processes, each compared bit by bit: half an hour.
soak: $(INSTALLED)
	LABO_SOAK=5 $(BIN)/python -m pytest tests/lab/run/test_resume.py

# Damaged files for every reader and command, and the C kernel under sanitizers: half an hour.
fuzz: $(INSTALLED)
	$(BIN)/python -m fuzz

# torch comes first and pinned: unpinned it would bring gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard src/labo/fast/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/labo/fast/*.so
