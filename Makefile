# Every target that runs something builds its environment first; see scripts/setup.sh for what that
# does and which variables it reads. `make -j` gains nothing here, and would mix outputs.
.NOTPARALLEL:
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
# Two workers fit a small machine: a test that compiles keeps a core and a good GiB busy.
WORKERS ?= 2
PROMPT ?= Name three primary colors.
# A prompt is text: a dollar sign in it is no variable of make's.
override PROMPT := $(value PROMPT)
# Options for pytest, as in: make test-fast ARGS="tests/unit -k signature"
ARGS ?=
# A slow test may compile a whole model.
SLOW_TIMEOUT ?= 1200

export VENV PYTHON PROMPT
BIN := $(VENV)/bin

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  PROMPT="..." for demo; ARGS="..." for pytest; PYTHON=..., VENV=... for set-up'

.PHONY: setup
setup: ## Build the environment in .venv (the other targets do this by themselves)
	@scripts/setup.sh

.PHONY: demo
demo: setup ## Run a small language model on these operators and check it
	@"$(BIN)/python" -m examples.smollm "$$PROMPT" --verify

.PHONY: test
test: test-fast ## Run both tiers of tests, as continuous integration does
	@# pytest calls a run without a test a failure, and rightly; so tier 2 runs once it has a test.
	@if grep -rqE --include='*.py' 'mark\.slow' tests; then \
		echo '[tests 2/2] slow tier, $(WORKERS) workers'; \
		"$(BIN)/python" -m pytest -n $(WORKERS) -m slow --timeout=$(SLOW_TIMEOUT) $(ARGS); \
	else \
		echo '[tests 2/2] no test is marked slow'; \
	fi

.PHONY: test-fast
test-fast: setup ## Run the first tier only
	@echo '[tests 1/2] fast tier, $(WORKERS) workers'
	@"$(BIN)/python" -m pytest -n $(WORKERS) -m 'not slow' $(ARGS)

.PHONY: test-torch
test-torch: ## Run the first tier on another release of torch: TORCH=2.11.0
	@scripts/test-torch.sh '$(TORCH)' -n $(WORKERS) -m 'not slow' $(ARGS)

.PHONY: lint
lint: setup ## Check style, types and import contracts
	@echo '[lint 1/4] ruff check'
	@"$(BIN)/python" -m ruff check .
	@echo '[lint 2/4] ruff format'
	@"$(BIN)/python" -m ruff format --check .
	@echo '[lint 3/4] mypy'
	@"$(BIN)/python" -m mypy
	@echo '[lint 4/4] import-linter'
	@"$(BIN)/lint-imports"

.PHONY: bench
bench: ## List the benchmark commands (they want a card and a quiet machine, so none is run)
	@echo '  $(BIN)/python -m tileops.bench --help'
	@for file in benchmarks/[a-z]*.py; do \
		if [[ -e $$file ]]; then \
			name=$${file#benchmarks/}; echo "  $(BIN)/python -m benchmarks.$${name%.py} --help"; \
		fi; \
	done

.PHONY: clean
clean: ## Remove the environment and every cache in this folder
	rm -rf "$(VENV)" "$(VENV).lock" .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
