# Two commands: `make train` shows a recovery on this machine, `make test` runs every check.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs

# Ray turns token authentication on by itself once a token exists; here nothing listens beyond this machine.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0

.DEFAULT_GOAL := help
.PHONY: help venv train test clean

help:
	@echo "make train   train the laptop preset on this machine, through a killed worker"
	@echo "make test    every check and every test"
	@echo "make venv    only create $(VENV) and install"
	@echo "make clean   remove caches and build leftovers (runs/ and $(VENV) stay)"

venv: $(VENV)/installed

# The stamp is younger than pyproject.toml exactly while the environment matches it.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " \
	    + sys.version.split()[0] + "; choose one with: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

train: venv
	@n=1; while [ -e $(RUNS)/laptop-$$n ]; do n=$$((n + 1)); done; mkdir -p $(RUNS); \
	exec $(BIN)/python jobs/train_1t.py --preset laptop --run-dir $(RUNS)/laptop-$$n $(ARGS)

test: venv
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --numprocesses 2 tests/unit tests/sim
	$(BIN)/python -m pytest --durations 12 tests/ray tests/gpu

clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
