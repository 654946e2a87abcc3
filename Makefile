# Every target builds what it needs into .venv, once. These can be given on the command line:
#   PYTHON       the Python to build .venv with
#   TORCH        auto: PyTorch's build for CPUs if there is no NVIDIA driver; cpu, cuda: that build;
#                system: the torch that PYTHON has, with ranges instead of pins for the rest
#   CONSTRAINTS  the pins
PYTHON      ?= python3
VENV        := .venv
CONSTRAINTS ?= .ci/constraints.txt
INSTALLED   := $(shell cat $(VENV)/.torch 2> /dev/null)
TORCH       ?= $(or $(INSTALLED),auto)
BIN         := $(VENV)/bin
PINS        := $(if $(filter system,$(TORCH)),$(VENV)/system.txt,$(CONSTRAINTS))
PIP         := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(PINS)

PARALLEL    := -n auto --dist loadfile --no-loadscope-reorder

ifneq ($(INSTALLED),)
ifneq ($(INSTALLED),$(TORCH))
$(error $(VENV) has TORCH=$(INSTALLED): run `make clean` before TORCH=$(TORCH))
endif
endif

.PHONY: help serve test test-all lint types gates resolve pins notebooks clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## install, then serve the bundled model on 127.0.0.1:8000, playground included
	@$(BIN)/nanoserve serve

test: $(VENV)/.dev ## install, then run the suite (`make test-all` adds what is marked slow)
	@$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

test-all: $(VENV)/.dev ## the suite with its slow tests
	@$(BIN)/python -m pytest -q $(PARALLEL)

lint: $(VENV)/.dev ## ruff: rules and format
	@$(BIN)/ruff check && $(BIN)/ruff format --check

types: $(VENV)/.dev ## strict type check of the phases and the course
	@$(BIN)/mypy

gates: $(VENV)/.dev ## listings equal the source; every exercise is caught by a test
	@$(BIN)/python -m chapters weave --check
	@$(BIN)/python -m chapters exercises --gate

resolve: $(VENV)/.dev ## pins and ranges can be installed on every supported Python and platform (asks the index)
	@$(BIN)/python .ci/resolve.py

pins: $(VENV)/.dev ## raise the pins to the newest versions that go with the pinned torch
	@grep '^torch==' $(CONSTRAINTS) > $(VENV)/torch.txt
	@$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 --extra dev --no-annotate \
	  --custom-compile-command 'make pins' --constraint $(VENV)/torch.txt --output-file $(CONSTRAINTS) pyproject.toml

notebooks: $(VENV)/.dev ## execute the notebooks and keep their outputs
	@$(BIN)/python -m chapters notebooks --execute

clean: ## forget the environment and all caches
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis phase*/kernels/__pycache__ phase*/kernels/*/__pycache__

$(VENV)/.torch: $(CONSTRAINTS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" CONSTRAINTS="$(CONSTRAINTS)" sh .ci/install_torch.sh $(TORCH)
	@echo $(TORCH) > $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	@echo "Installing the other libraries (about 120 MB)."
	@$(PIP) --editable .
	@echo "Compiling the kernels for this machine."
	@$(BIN)/nanoserve generate --max-tokens 2 "How does a serving engine find the pages of a request?" > /dev/null
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Adding what the course and the tests need (Triton alone is 200 MB)."
	@$(PIP) --editable '.[dev]'
	@touch $@
