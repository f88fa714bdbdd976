# Everything from a fresh machine: each target first makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check bench docs soak clean

demo: $(INSTALLED)
	$(BIN)/labo demo

test: check
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# Killed runs of every method, in one and in two processes, each compared bit by bit: half an hour.
soak: $(INSTALLED)
	LABO_SOAK=5 $(BIN)/python -m pytest tests/lab/run/test_resume.py

# torch comes first and pinned: unpinned it would bring gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard src/labo/fused/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .[dev]
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/labo/fused/*.so
