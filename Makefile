# Every target builds what it needs into .venv, once. PYTHON, VENV and CONSTRAINTS can be given on the command line.
PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= .ci/constraints.txt
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint $(CONSTRAINTS)

.PHONY: help serve test test-all lint types gates notebooks clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## install, then serve the bundled model on 127.0.0.1:8000, playground included
	@$(BIN)/nanoserve serve

test: $(VENV)/.dev ## install, then run the suite (`make test-all` adds what is marked slow)
	@$(BIN)/python -m pytest -q -m "not slow"

test-all: $(VENV)/.dev ## the suite with its slow tests
	@$(BIN)/python -m pytest -q

lint: $(VENV)/.dev ## ruff: rules and format
	@$(BIN)/ruff check && $(BIN)/ruff format --check

types: $(VENV)/.dev ## strict type check of the phases and the course
	@$(BIN)/mypy

gates: $(VENV)/.dev ## listings equal the source; every exercise is caught by a test
	@$(BIN)/python -m chapters weave --check
	@$(BIN)/python -m chapters exercises --gate

notebooks: $(VENV)/.dev ## execute the notebooks and keep their outputs
	@$(BIN)/python -m chapters notebooks --execute

clean: ## forget the environment and all caches
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis phase*/kernels/__pycache__

$(VENV)/.serve: pyproject.toml $(CONSTRAINTS)
	@echo "Installing into $(VENV), once; this takes a minute or two."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@echo "Compiling the kernels for this machine."
	@$(BIN)/nanoserve generate --max-tokens 2 "How does a serving engine find the pages of a request?" > /dev/null
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Adding what the course and the tests need."
	@$(PIP) --editable '.[dev]'
	@touch $@
