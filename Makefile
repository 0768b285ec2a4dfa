# Every target works from nothing: it makes .venv, installs what it needs and builds the native module.
# Needed: Python 3.10 or newer with venv, a C++17 compiler, make. `make help` lists the targets.

PYTHON ?= python3
# What the project is developed and tested with; the package itself takes any torch >= 2.6.
TORCH ?= torch==2.13.0
# Processes that run tests; more are no gain on two cores.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
PACKAGE := $(VENV)/.package
PEERS := $(VENV)/.peers
NATIVE := $(sort $(wildcard native/*.cpp native/*.h native/cuda/*))
CLEAN_VENV := build/clean-venv

# make must neither skip a target because of a file of its name, nor leave a half-made stamp behind.
.PHONY: help setup demo test check format acceptance bench wheel clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@echo "make demo        train, kill, restore from RAM, compare, reshard, verify: what this is for, in minutes"
	@echo "make test        the tests (no root, 7 to 10 minutes on 2 cores)"
	@echo "make check       ruff, mypy --strict, clang-format"
	@echo "make acceptance  the tests that need root, real servers or minutes"
	@echo "make bench       the figures"
	@echo "make wheel       build sdist and wheel, try the wheel without torch"
	@echo "make format      let ruff and clang-format rewrite the sources"
	@echo "make clean       remove all that the other targets made"

# The newest pip is taken because older ones know no dependency groups (--group).
$(TOOLS): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" --group dev
	touch $@

$(PACKAGE): $(TOOLS) setup.py $(NATIVE)
	$(BIN)/python -m pip install -qq --editable .
	touch $@

setup: $(PACKAGE)

demo: setup
	$(BIN)/tierckpt demo

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not acceptance"

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h,$(NATIVE))

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(NATIVE))

# Crash points are enumerated by strace; the tests that need it say so when it is missing.
acceptance: setup
	@if ! command -v strace >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq strace; fi
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m acceptance --durations=10

$(PEERS): $(TOOLS)
	$(BIN)/python -m pip install --quiet "$(TORCH)" --group bench
	touch $@

# BENCH='--gib 0.25 --rounds 1' for a quick look; both take --gib, --rounds, --root and --json.
bench: setup $(PEERS)
	$(BIN)/python benchmarks/foundation.py $(BENCH)
	$(BIN)/python benchmarks/snapshot.py $(BENCH)

# torch is no dependency: what the wheel promises to an auditor is tried where there is none.
wheel: setup
	rm -rf dist $(CLEAN_VENV)
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv $(CLEAN_VENV)
	$(CLEAN_VENV)/bin/python -m pip install --quiet dist/*.whl
	cd $(CLEAN_VENV) && bin/python -c "import importlib.util as u, tierckpt._native; assert u.find_spec('torch') is None"
	cd $(CLEAN_VENV) && bin/tierckpt --help

clean:
	rm -rf $(VENV) build dist *.egg-info tierckpt/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
