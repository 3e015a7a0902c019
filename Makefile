# Everything sets itself up: a virtual environment in .venv, the pinned packages, this project in editable mode.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --disable-pip-version-check -q
DEV := $(VENV)/.installed-dev,demo,lightning

.PHONY: quickstart test test-all lint format clean

# One stamp per set of extras, so that a change of pins reinstalls and nothing else does.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)  # one that broke off, too
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	touch $@

# Trains all-MiniLM-L6-v2 on SciFact with a bank of negatives and scores it on BEIR's test queries, before and after.
# COMPARE=1 trains plain gradient accumulation with the same budget as well.
quickstart: $(VENV)/.installed-demo
	$(BIN)/python scripts/quickstart.py $(if $(COMPARE),--compare) $(QUICKSTART_ARGS)

# For every change. A process per core, each with one thread and whole files of tests: what a file sets up is set up once.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "not long" $(PYTEST_ARGS)

# Before an issue is called done: the long ones as well (fuzzing, twenty kills, SciFact at full size).
test-all: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info runs .pytest_cache .mypy_cache .ruff_cache
