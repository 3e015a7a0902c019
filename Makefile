# Everything sets itself up: a virtual environment in .venv, the pinned packages, this project in editable mode.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --disable-pip-version-check -q
CONSTRAINTS ?= constraints.txt
DEV := $(VENV)/.installed-dev,demo,lightning
# For each process of the tests: torch's threads, and those of the tokenizers.
ONE_THREAD := OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1
# The lowest versions that pyproject.toml allows of the two that the trainer builds on, and what these need of others.
LOWEST = $(shell sed -nE 's/^ *"((sentence-)?transformers)>=([0-9.]+),.*/\1==\3/p' pyproject.toml)
LOWEST += tokenizers==0.22.2 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.18

.PHONY: quickstart test test-lowest test-newest test-all lint format docs dist clean

# One stamp per set of extras, so that a change of pins reinstalls and nothing else does.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)  # one that broke off, too
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[$*]'
	touch $@

# Fits all-MiniLM-L6-v2 to SciFact, then trains it with a bank of negatives; both are scored on BEIR's test queries.
# COMPARE=1 trains plain gradient accumulation with the same budget as well.
quickstart: $(VENV)/.installed-demo
	$(BIN)/contaccum quickstart $(if $(COMPARE),--compare) $(QUICKSTART_ARGS)

# For every change. A process per core, each with one thread and whole files of tests: what a file sets up is set up once.
test: $(DEV)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto --dist loadfile -m "not long" $(PYTEST_ARGS)

# These few packages in a folder of their own, which comes before the environment's; the tests that lean most on them.
$(VENV)-lowest/.installed: pyproject.toml Makefile | $(DEV)
	rm -rf $(@D)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-compile --target $(@D) $(LOWEST)
	touch $@

test-lowest: $(DEV) $(VENV)-lowest/.installed
	PYTHONPATH=$(abspath $(VENV)-lowest) $(ONE_THREAD) $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS) \
		tests/losses/test_contaccum_loss.py tests/encoders/test_dual_encoder.py tests/test_loops.py tests/encoders/test_adapters.py \
		tests/training/test_updates.py --deselect tests/encoders/test_adapters.py::test_what_is_not_installed_is_named

# The newest versions that pyproject.toml allows, whatever is pinned.
test-newest:
	$(MAKE) test VENV=$(VENV)-newest CONSTRAINTS=/dev/null

# Before an issue is called done: the long ones as well (fuzzing, twenty kills, SciFact at full size).
test-all: $(DEV)
	$(ONE_THREAD) $(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, into build/site; a link that leads nowhere is an error. `make docs SERVE=1` shows it, and what is saved meanwhile.
# The variable silences the theme's notice about successors of mkdocs.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve,build --strict)

# What is published: sdist and wheel. Building needs none of the packages above, so it has an environment of its own.
$(VENV)-dist/.installed: constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) build twine
	touch $@

dist: $(VENV)-dist/.installed
	rm -rf dist
	$(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-dist build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache
