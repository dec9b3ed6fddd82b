# Everything happens in .venv; a command sets it up first when it is missing or out of date.
#
# PYTHON       interpreter for the virtual environment (default: the first one found that is 3.11 or newer)
# TORCH_INDEX  extra package index for torch, where pip would fetch a CUDA build
# ARGS         overrides for `make ablation`, e.g. ARGS="experiment=smoke"
# PYTEST_ARGS  further arguments of the test run, e.g. PYTEST_ARGS="-m 'not slow'"

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTHONS = $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq install -c constraints.txt

export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help ablation test install lint clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@awk '/^# [A-Z_]+  / {sub("# ", "  "); print}' Makefile

ablation: $(STAMP) ## compare the credit strategies on the built-in task and write a report
	@$(BIN)/apportion ablate $(ARGS)

test: lint ## run every check: ruff, mypy, import-linter, doctests, tests
	@echo "==> doctests"
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -q --doctest-modules --doctest-ignore-import-errors src/apportion
	@echo "==> tests"
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -q -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP) ## run the static checks only
	@echo "==> ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> import-linter"
	@$(BIN)/lint-imports

install: $(STAMP) ## set up .venv with the tested versions
	@echo "ready: $(BIN)/apportion --help"

# An interrupted set-up leaves no stamp, so the next call goes on where this one stopped.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  chosen=; for candidate in $(PYTHONS); do \
	    if $$candidate -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      chosen=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$chosen" ]; then \
	    echo "make: need Python 3.11 or newer with its venv module; tried: $(PYTHONS)." >&2; \
	    echo "      Install one (Debian and Ubuntu: apt install python3-venv) or name it: make install PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "==> set-up 1/3: virtual environment in $(VENV) ($$($$chosen --version))"; \
	  $$chosen -m venv --clear $(VENV); \
	fi
	@echo "==> set-up 2/3: torch, the largest download (minutes on a slow line)"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "==> set-up 3/3: apportion and the libraries in constraints.txt"
	@$(PIP) -e ".[dev,math,gguf,json,code,judge]"
	@touch $@

clean: ## remove .venv, caches and build folders; outputs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find verifiers credit prm grpo experiments integrations conf tests src -name __pycache__ -type d -prune -exec rm -rf {} +
