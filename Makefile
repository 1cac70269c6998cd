# Needs Python 3.10 to 3.13 and make; everything else is installed into $(VENV).
#
#   make demo              set up, then publish and run an example workflow; no network or key is needed for the run
#   make test              set up, then run the tests
#   make PYTHON=python3.12 VENV=.venv312 test

VENV ?= .venv
PEERS_VENV ?= .venv-peers
# The first interpreter on the path that fits; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)

BIN := $(VENV)/bin
IN_VENV := PATH="$(abspath $(VENV))/bin:$$PATH"
PIP := PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q -c constraints.txt
SETUP := pyproject.toml constraints.txt
export DAGSTER_DISABLE_TELEMETRY := yes
# Tests, demo and benchmarks start many processes; without bytecode each of them compiles AgentMesh anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo dev test soak check format bench bench-peers clean

help:
	@echo "make demo    publish and run an example workflow (sets up $(VENV) first, like all targets)"
	@echo "make dev     Dagster UI and daemon on the demo's project"
	@echo "make test    run the tests"
	@echo "make soak    kill runs at every fault point and at random, on both databases: an hour or two"
	@echo "make check   ruff, format, pyright, import-linter, docs"
	@echo "make format  mend what ruff can mend"
	@echo "make bench   measure against hand-written Dagster jobs"
	@echo "make bench-peers  measure beside LangGraph, which is installed into $(PEERS_VENV)"
	@echo "make clean   remove $(VENV), $(PEERS_VENV), .demo and caches"

# One file says that a folder exists and is complete; a set-up that was cut off starts again.
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is not Python 3.10 to 3.13. Name one that is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) has no 'venv' or 'ensurepip' module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test ! -e $(VENV) || test -w $(VENV) || { echo "$(VENV) belongs to another user. Remove it, or choose another: make VENV=.venv-mine" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The build back end comes from the constraints too, so the package is built without isolation.
$(VENV)/.installed: $(VENV)/.created $(SETUP)
	@echo "Installing AgentMesh and its dependencies into $(VENV)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools for tests and checks into $(VENV)"
	@$(PIP) --no-build-isolation -e '.[test,dev]'
	@touch $@

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	@$(IN_VENV) sh scripts/demo.sh

dev: $(VENV)/.installed
	@$(IN_VENV) sh scripts/demo.sh dev

test: $(VENV)/.installed-dev
	@$(IN_VENV) $(BIN)/python -m pytest $(ARGS)

soak: $(VENV)/.installed-dev
	@$(IN_VENV) $(BIN)/python -m pytest -m soak --numprocesses=0 $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python scripts/check_docs.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@$(IN_VENV) $(BIN)/python -m bench $(ARGS)

# LangGraph runs in a process of its own environment: the project never imports it.
bench-peers: $(VENV)/.installed-dev
	@$(IN_VENV) $(BIN)/python -m bench.peers --venv $(PEERS_VENV) $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS_VENV) .demo .pytest_cache .ruff_cache .hypothesis dist
