# Two commands for a new user: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
APPROVE ?= yes
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPM := requirements/node_modules/.package-lock.json

export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export GX_ANALYTICS_ENABLED := false

.PHONY: help install npm demo test test-fast test-all test-gpu screenshots check bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make the virtual environment (.venv), nothing global

$(STAMP): pyproject.toml constraints.txt requirements/tritonserver.txt
	@echo "Installing into $(VENV) (first time: a few minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,rtx]'
	@$(BIN)/python -m pip install --quiet --no-deps -r requirements/tritonserver.txt
	@touch $@

npm: $(NPM)  ## what checks the decision page for everybody, and a server of Azure's storage; tests skip by name without them

$(NPM): requirements/package-lock.json
	@if ! command -v npm >/dev/null; then echo "npm not found: tests that need axe-core or Azurite skip"; \
	elif ! npm ci --prefix requirements --ignore-scripts --no-audit --no-fund --loglevel=error; then \
	echo "axe-core and Azurite could not be fetched: tests that need them skip"; else touch $@; fi

demo: $(STAMP)  ## registered model -> engines -> verdicts -> benchmark -> approval -> live Triton, and back (APPROVE=ask asks you)
	@$(BIN)/enginegate demo --approve $(APPROVE)

test: $(STAMP) $(NPM)  ## every test that needs no GPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -n 3 --dist loadgroup $(ARGS)

test-fast: $(STAMP)  ## the inner loop: rules and rooms without servers, in less than a minute
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest tests/unit -n 2 -m "not gpu and not slow" $(ARGS)

test-all: test  ## also the long lanes: what compiles or trains for long, every example decision in a browser, kills of every operation and of a fleet, a live swap under load
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest tests/integration/report -m every_page
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pytest -n 2 --dist loadgroup -m long
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/kill_promotions.py --kills 300
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/kill_promotions.py --fleet
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/live_swap.py

# On a GPU host the environment is usually there already: GPU_PYTHON names its Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

test-gpu:  ## tests/gpu: needs an NVIDIA GPU; says what is missing for each kind (GPU_PYTHON names the Python)
	@$(GPU_PYTHON) -m pytest tests/gpu -m gpu -o addopts="--import-mode=importlib -ra" $(ARGS)

screenshots: $(STAMP)  ## take the pictures of docs/images anew (needs Debian's chromium and chromium-driver)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m docs.screenshots.take $(ARGS)

check: $(STAMP)  ## format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)  ## print the measured claims (benchmarks/)
	@for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:  ## remove the virtual environment and everything the demo made
	rm -rf $(VENV) .enginegate requirements/node_modules
