# Two commands: `make train` shows a recovery on this machine, `make test` checks what it promises.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs

export RAY_USAGE_STATS_ENABLED ?= 0
# Where the environment forbids bytecode, each of some thousand processes would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv train lint test test-all soak nvme docs clean

help:
	@echo "make train   train the laptop preset on this machine, through a killed worker"
	@echo "make test    style, types, and one test at least of each promise: ten minutes on two cores"
	@echo "make test-all  the tests that 'make test' leaves out; .ci/run does both"
	@echo "make soak    further values of what 'make test-all' runs on Ray, an hour; no part of .ci/run"
	@echo "make lint    style, imports and types only"
	@echo "make docs    the documentation as a site in build/site; warnings are errors"
	@echo "make nvme    build DeepSpeed's operators for offloading to NVMe, minutes; 'make test-all' then tests it"
	@echo "make venv    only create $(VENV) and install"
	@echo "make clean   remove caches and build leftovers (runs/ and $(VENV) stay)"

venv: $(VENV)/installed

# The stamp is younger than pyproject.toml exactly while the environment matches it.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " \
	    + sys.version.split()[0] + "; choose one with: make PYTHON=/path/to/python3 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[deepspeed]'
	@touch $@

train: venv
	@n=1; while [ -e $(RUNS)/laptop-$$n ]; do n=$$((n + 1)); done; mkdir -p $(RUNS); \
	exec $(BIN)/python jobs/train_1t.py --preset laptop --run-dir $(RUNS)/laptop-$$n \
	    --faults kill@step=21,phase=backward,rank=3 $(ARGS)

# Three processes on two cores: the tests on Ray stay in one of them, at last in two, and wait half of the time.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --durations 10 --durations-min 0.5 tests

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/vulture
	$(BIN)/lint-imports
	$(BIN)/mypy

# Types are checked beside the tests; each one's failure fails the target.
test: venv
	@begun=$$(date +%s); log=$$(mktemp); $(MAKE) --no-print-directory lint > $$log 2>&1 & lint=$$!; \
	$(PYTEST) -m "not slow and not soak"; tests=$$?; \
	wait $$lint; lint=$$?; test $$lint = 0 || cat $$log; rm $$log; echo "make test: $$(( $$(date +%s) - begun )) s"; \
	exit $$(( tests ? tests : lint ))

test-all: venv
	@begun=$$(date +%s); $(PYTEST) -m "slow and not soak"; tests=$$?; \
	echo "make test-all: $$(( $$(date +%s) - begun )) s"; exit $$tests

soak: venv
	$(PYTEST) -m soak

nvme: venv
	$(BIN)/python -c 'from elastic_ring.integrations.ray_train.ops import main; main()'

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
