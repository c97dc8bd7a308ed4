# Everything a newcomer and CI run. Needs Python 3.11 or 3.12 (with pip) and make; nothing else.
#
#   make run        set up once, then stream two answers through the three processes
#   make test       set up once, then run the tests
#   make test-slow  the long tests as well
#   make lint       ruff, mypy, generated code against the protos, buf (if it is there)
#   make clean      remove the virtual environment and every build product
#
# PYTHON=...       the interpreter to build the environment from
# TORCH_INDEX=...  the package index to take torch from (empty: a CPU build, see README, "Set-up")
# MODEL=...        a model file or directory for `make run` instead of the demo model
# PYTEST=...       more arguments for pytest

.DELETE_ON_ERROR:
.SUFFIXES:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3 python3.12 python3.11 python; do \
	if "$$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; \
	then echo "$$name"; break; fi; done)
TORCH_INDEX ?=
MODEL ?=
PYTEST ?=
BUF ?= $(shell command -v buf 2>/dev/null)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINED := $(PIP) install --constraint constraints.txt

.PHONY: help run test test-slow lint format protos setup setup-test setup-dev clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

run: setup
	$(BIN)/tessera demo $(if $(MODEL),--model "$(MODEL)")

# Two processes share the tests; "loadgroup" hands them out one by one, so that neither is left with the long ones.
test: setup-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu" $(PYTEST)

test-slow: setup-test
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check
	@if [ -n "$(BUF)" ]; then echo "$(BUF) lint protos" && "$(BUF)" lint protos; \
	else echo "SKIPPED: buf lint protos (buf is not on PATH; npm install --global @bufbuild/buf)"; fi

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup-dev
	$(BIN)/python protos/generate.py

setup: $(VENV)/.stamp-run $(if $(MODEL),,$(VENV)/.stamp-model)
setup-test: $(VENV)/.stamp-test $(VENV)/.stamp-model
setup-dev: $(VENV)/.stamp-dev

# The stamps are what makes a second call do nothing: each is newer than what it was made from.
$(VENV)/.stamp-venv:
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 or 3.12 found. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "$(PYTHON) is not Python 3.11 or 3.12." >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-torch: $(VENV)/.stamp-venv constraints.txt
	$(BIN)/python -P cli/torch_build.py install --constraint constraints.txt --index "$(TORCH_INDEX)"
	$(BIN)/python -P cli/torch_build.py check
	@touch $@

# What a wider set-up installs holds for the narrower ones too, so that none of them runs after it.
$(VENV)/.stamp-run: $(VENV)/.stamp-torch constraints.txt pyproject.toml
	$(CONSTRAINED) --editable .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-torch constraints.txt pyproject.toml
	$(CONSTRAINED) --editable ".[test]"
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch constraints.txt pyproject.toml
	$(CONSTRAINED) --editable ".[test,dev]"
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-test $@

$(VENV)/.stamp-model: cli/model_store.py | $(VENV)/.stamp-run
	$(BIN)/tessera model fetch
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .buf
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
