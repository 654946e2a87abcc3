# Every target builds what it needs into .venv, once. These can be given on the command line:
#   PYTHON       the Python to build .venv with
#   MODEL        what `make serve` serves: a name of `nanoserve models`, a directory, a GGUF file, a name on the hub; without,
#                the bundled model with a small pool (--demo). MODEL=tiny_chat: that model with a pool of the real size
#   TORCH        auto: PyTorch's build for CPUs if there is no NVIDIA driver; cpu, cuda: that build;
#                system: the torch that PYTHON has, with ranges instead of pins for the rest
# What the server needs is pinned in .ci/serve.txt, what the course and the tests need too in .ci/constraints.txt, and
# what builds the book in .ci/book.txt. The clients of `make clients` and their pins are in .ci/clients.in and
# .ci/clients.txt, those of `make cluster`, `make routers` (and `make operate`) and `make test-browser` in .ci/cluster.in and so on. `make pins` keeps the
# pins of the clients, the routers and the browser while they fit. Delete the file to raise them.
# pip checks the hash of every file that it installs, but for torch and the CUDA libraries it brings: each index builds
# its own. TORCH=system has no pins.
PYTHON      ?= python3
VENV        := .venv
INSTALLED   := $(shell cat $(VENV)/.torch 2> /dev/null)
TORCH       ?= $(or $(INSTALLED),auto)
BIN         := $(VENV)/bin
SYSTEM      := $(filter system,$(TORCH))
PIP         := $(BIN)/python -m pip --disable-pip-version-check install
COMPILE     := $(BIN)/uv pip compile --no-config --quiet --universal --python-version 3.11 --no-annotate \
                 --generate-hashes --custom-compile-command 'make pins'

# What `make speed` compares with: the last commit, and the one before it if nothing has changed since.
AGAINST     ?= $(if $(shell git status --porcelain --untracked-files=no),HEAD,HEAD~1)

CLIENTS     := $(VENV)/clients
CLUSTER     := $(VENV)/cluster
ROUTERS     := $(VENV)/routers
BROWSER     := $(VENV)/browser
NPM         := $(shell command -v npm)

PARALLEL    := -n auto --dist loadfile --no-loadscope-reorder
# What holds oneDNN, torch, MKL and numba to AVX2. numba takes the machine's features if it is given no list of them.
AVX2        := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
                 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma
KERNELS     := $(addprefix tests/phase2_prefill_decode/test_,linear.py compiled.py forward.py attention_cpu.py \
                 attention.py pointwise.py draw.py mask.py)

ifneq ($(INSTALLED),)
ifneq ($(INSTALLED),$(TORCH))
$(error $(VENV) has TORCH=$(INSTALLED): run `make clean` before TORCH=$(TORCH))
endif
endif

.PHONY: help serve try install test speed test-avx2 test-all test-browser pictures test-models clients cluster routers operate lint types gates house book resolve pins notebooks clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## install, then serve the bundled model on 127.0.0.1:8000, playground included (MODEL=smollm2: another)
	@trap : INT; $(BIN)/nanoserve serve $(or $(MODEL),--demo) || [ $$? -eq 130 ] # Ctrl-C is how it ends, and no error of make

try: $(VENV)/.serve ## the engine in a browser tab, on no server: packs it (Python for the browser: 14 MB, once) and opens it
	@trap : INT; $(BIN)/python -m chapters.book.open || [ $$? -eq 130 ]

install: $(VENV)/.dev ## install what the course and the tests need

test: $(VENV)/.dev ## install, then run the suite (`make test-all` adds what is marked slow)
	@$(BIN)/python -m pytest -q -m "not slow" $(PARALLEL)

test-avx2: $(VENV)/.dev ## the tests of the CPU's kernels as on a processor that has AVX2 and no more
	@$(AVX2) $(BIN)/python -m pytest -q -m "not slow" -k "not triton" $(PARALLEL) $(KERNELS)

test-all: $(VENV)/.dev ## the suite with its slow tests, then the engines' tests one step ahead, and with drafts
	@$(BIN)/python -m pytest -q $(PARALLEL)
	@$(BIN)/python -m pytest -q -m "not slow" --ahead $(PARALLEL) tests/phase5_continuous tests/phase6_integration
	@$(BIN)/python -m pytest -q -m "not slow" --drafts $(PARALLEL) tests/phase5_continuous tests/phase6_integration

speed: $(VENV)/.dev ## the engine beside itself as of the last commit (AGAINST=COMMIT: of another), in turns, on this processor
	@rm -f build/peers/speed.json
	@$(BIN)/nanoserve bench compare --against $(AGAINST) --peers ours before ours_int4 before_int4 --shapes 17m 596m \
	  --rounds 2 --workloads 1x16+64 16x128+64 8x128+32 4x512+1 --json build/peers/speed.json

test-models: $(VENV)/.dev ## models with trained weights beside transformers and llama.cpp (JSON=FILE: also their study, written there)
	@$(BIN)/python -m phase6_integration.lab peers.real_models $(MODEL) $(if $(JSON),--study --json $(JSON))

clients: $(CLIENTS)/.done ## LangChain, LiteLLM, the AI SDK and others against a server (needs no more than `make serve`)
	@$(if $(NPM),,echo "npm is not installed: the clients for Node are left out")
	@$(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini --serve "$(BIN)/nanoserve serve" \
	  $(if $(NPM),,--ignore tests/clients/with_node.py) --junitxml build/clients/matrix.xml tests/clients

cluster: $(CLUSTER)/.done ## replicas by Ray Serve on this machine: deployed, killed and updated
	@$(CLUSTER)/bin/python -m pytest -q -c tests/cluster/pytest.ini tests/cluster

routers: $(ROUTERS)/.done ## what stands in front of servers: nginx and HAProxy, Dynamo, and Kubernetes' schemas
	@for proxy in nginx haproxy; do PATH=$$PATH:/usr/sbin command -v $$proxy > /dev/null || \
	  { echo "$$proxy is not installed: apt-get install nginx-light haproxy"; exit 1; }; done
	@PATH=$$PATH:/usr/sbin $(BIN)/python -m pytest -q -o python_files='with_*.py' tests/routers/with_proxies.py
	@NANOSERVE=$(BIN)/nanoserve $(ROUTERS)/bin/python -m pytest -q -c tests/clients/pytest.ini \
	  tests/routers/with_dynamo.py tests/routers/with_kubernetes.py

operate: $(ROUTERS)/.done ## dashboard, alerts, an upgrade under load and the files of deploy: by Prometheus, nginx, HAProxy and systemd
	@for one in nginx haproxy prometheus promtool systemd-analyze; do PATH=$$PATH:/usr/sbin command -v $$one > /dev/null || \
	  { echo "$$one is not installed: apt-get install nginx-light haproxy prometheus systemd"; exit 1; }; done
	@PATH=$$PATH:/usr/sbin $(BIN)/python -m pytest -q -o python_files='with_*.py' --ignore tests/operate/with_files.py tests/operate
	@$(ROUTERS)/bin/python -m pytest -q -c tests/clients/pytest.ini tests/operate/with_files.py

test-browser: $(BROWSER)/.done ## the page in headless Chromium (apt-get install chromium), needs no more than `make serve`
	@$(BROWSER)/bin/python -m pytest -q -c tests/browser/pytest.ini --serve "$(BIN)/nanoserve serve" tests/browser

pictures: $(BROWSER)/.done ## the page at several sizes, into build/pictures, and the animation of the README
	@$(BROWSER)/bin/python tests/browser/pictures.py --serve "$(BIN)/nanoserve serve"

lint: $(VENV)/.dev ## ruff: rules and format; codespell: spelling
	@$(BIN)/ruff check && $(BIN)/ruff format --check
	@$(BIN)/codespell

types: $(VENV)/.dev ## strict type check of the phases and the course
	@$(BIN)/mypy

gates: $(VENV)/.dev ## listings equal the source; every exercise and every planted bug is caught by a test
	@$(BIN)/python -m chapters weave --check
	@$(BIN)/python -m chapters exercises --gate
	@$(BIN)/python -m chapters break --gate

house: $(VENV)/.serve ## the size of core and extras, and how far the core is from its aims
	@$(BIN)/python .ci/house.py

book: $(VENV)/.book ## the site of the book, into build/book; a warning, as of a dead link, is an error
	@$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c chapters/book -d build/doctrees . build/book
	@$(BIN)/python -m chapters.book.pack build/book
	@echo "The book is in build/book/index.html"

resolve: $(VENV)/.dev ## pins and ranges can be installed on every supported Python and platform (asks the index)
	@$(BIN)/python .ci/resolve.py

pins: $(VENV)/.dev ## raise the pins to the newest versions that go with the pinned torch
	@sed -n 's/^\(torch==[^ ]*\).*/\1/p' .ci/constraints.txt > $(VENV)/torch.txt
	@$(COMPILE) --upgrade --extra dev --constraint $(VENV)/torch.txt --output-file .ci/constraints.txt pyproject.toml
	@$(COMPILE) --upgrade --group book --constraint .ci/constraints.txt --output-file .ci/book.txt
	@echo hatchling | $(COMPILE) --upgrade --constraint .ci/constraints.txt --output-file .ci/serve.txt pyproject.toml -
	@$(COMPILE) --output-file .ci/clients.txt .ci/clients.in
	@$(COMPILE) --upgrade --constraint .ci/constraints.txt --output-file .ci/cluster.txt .ci/cluster.in
	@$(COMPILE) --output-file .ci/routers.txt .ci/routers.in
	@$(COMPILE) --output-file .ci/browser.txt .ci/browser.in

notebooks: $(VENV)/.dev ## execute the notebooks and keep their outputs
	@$(BIN)/python -m chapters notebooks --execute

clean: ## forget the environment and all caches
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis phase*/kernels/__pycache__ phase*/kernels/*/__pycache__

$(VENV)/.torch: .ci/serve.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh .ci/install_torch.sh $(TORCH)
	@echo $(TORCH) > $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	@$(PIP) $(if $(SYSTEM),--constraint $(VENV)/system.txt,--quiet --no-deps --no-build-isolation) --editable .
	@echo "Compiling the kernels for this machine, once."
	@$(BIN)/nanoserve generate --chat --max-tokens 2 "How does a serving engine find the pages of a request?" > /dev/null
	@touch $@

$(VENV)/.dev: $(VENV)/.serve .ci/constraints.txt
	@echo "Adding what the course and the tests need (Triton alone is 200 MB)."
ifneq ($(SYSTEM),)
	@$(PIP) --constraint $(VENV)/system.txt --editable '.[dev]'
else
	@awk '/^[a-z]/ {keep = !/^(torch==|cuda-|nvidia-)/} keep' .ci/constraints.txt > $(VENV)/dev.txt
	@$(PIP) --require-hashes --no-deps --requirement $(VENV)/dev.txt
endif
	@touch $@

$(VENV)/.book: $(VENV)/.dev .ci/book.txt
	@echo "Adding what the book is built with."
	@$(PIP) --require-hashes --no-deps --requirement .ci/book.txt
	@touch $@

$(ROUTERS)/.done: $(VENV)/.dev .ci/routers.txt
	@echo "Installing Dynamo's runtime, schemas and linters (360 MB), in an environment of their own."
	@"$(PYTHON)" -m venv $(ROUTERS)
	@$(ROUTERS)/bin/python -m pip --disable-pip-version-check install --require-hashes --no-deps --requirement .ci/routers.txt
	@touch $@

$(BROWSER)/.done: $(VENV)/.serve .ci/browser.txt
	@echo "Installing Playwright (200 MB), in an environment of its own."
	@"$(PYTHON)" -m venv $(BROWSER)
	@$(BROWSER)/bin/python -m pip --disable-pip-version-check install --require-hashes --no-deps --requirement .ci/browser.txt
	@touch $@

$(CLIENTS)/.done: $(VENV)/.serve .ci/clients.txt tests/clients/node/package-lock.json
	@echo "Installing the clients (1.4 GB) beside the server, in an environment of their own."
	@"$(PYTHON)" -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --require-hashes --no-deps --requirement .ci/clients.txt
	@$(if $(NPM),npm ci --silent --no-audit --no-fund --prefix tests/clients/node)
	@touch $@

# It has what .venv has, and Ray.
$(CLUSTER)/.done: $(VENV)/.dev .ci/cluster.txt
	@echo "Installing Ray (250 MB) beside the server, in an environment of its own."
	@$(BIN)/python -m venv $(CLUSTER)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(CLUSTER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth
	@$(CLUSTER)/bin/python -m pip --disable-pip-version-check install --require-hashes --no-deps --requirement .ci/cluster.txt
	@touch $@
