# Everything a newcomer and CI run. Needs Python 3.11 or 3.12 (with pip) and make; nothing else.
#
#   make run        set up once, then stream two answers through the three processes
#   make test       set up once, then run the tests
#   make test-slow  the long tests as well
#   make test-triton  the GPU kernels, compiled ahead and interpreted, with other versions of Triton (tens of minutes)
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
# Beside the installed version of Triton: the lowest that is supported, and the one that a CUDA build of torch brings.
TRITONS ?= 3.6.0 3.7.1
BUF ?= $(shell command -v buf 2>/dev/null)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINED := $(PIP) install --constraint constraints.txt

.PHONY: help run test test-slow test-triton lint format protos setup setup-test setup-dev clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

run: setup
	$(BIN)/tessera demo $(if $(MODEL),--model "$(MODEL)")

# Two processes share the tests; "loadgroup" hands them out one by one, so that neither is left with the long ones.
test: setup-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu" $(PYTEST)

test-slow: setup-test
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST)

test-triton: setup-test
	@for version in $(TRITONS); do \
		folder=$(CURDIR)/$(VENV)/triton-$$version; \
		[ -d $$folder ] || $(PIP) install --quiet --no-deps --target $$folder triton==$$version || exit 1; \
		echo "Triton $$version"; \
		PYTHONPATH=$$folder TESSERA_TEST_COMPILE=1 CUDA_VISIBLE_DEVICES= \
			$(BIN)/python -m pytest tests/kernels/compiled -m "not slow" $(PYTEST) || exit 1; \
		PYTHONPATH=$$folder TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= \
			$(BIN)/python -m pytest tests/kernels/interpreted -m "not slow and not gpu" $(PYTEST) || exit 1; \
	done

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
