# kvscaler: `make help` says what there is. Every target does its own set-up and can be repeated.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STEP := hack/step
export PYTHON_BIN := $(abspath $(BIN)/python)

.PHONY: help setup cluster-up cluster-down images demo demo-fleet test test-chaos check bench crds requirements clean

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "; print "kvscaler\n\nUsage: make TARGET\n"} \
	  /^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "  Variables: PYTHON (3.11 or newer), VENV (.venv), KVSCALER_CACHE_DIR (~/.cache/kvscaler)"

setup: $(VENV)/.ready ## Make the virtual environment with every pinned dependency

$(VENV)/.ready: requirements/dev.txt requirements/model.txt pyproject.toml
	@$(STEP) "virtual environment in $(VENV)" hack/setup "$(PYTHON)" "$(VENV)"
	@touch $@

cluster-up: setup ## Start the local single-node Kubernetes (root; builds it on first use)
	@$(STEP) "local cluster up" hack/cluster/up

cluster-down: ## Stop the local cluster and leave nothing behind
	@$(STEP) "local cluster down" hack/cluster/down

images: setup ## Build the operator and sidecar images and import what changed
	@$(STEP) "images" hack/images/build --import

demo: setup ## The main job: a traffic spike scales a real model by its KV budget
	@$(BIN)/python -m hack.demo

demo-fleet: setup ## A tenfold spike on modelled H100s with Llama-3.1-8B, up to 20 Pods
	@$(BIN)/python -m hack.demo demo-fleet

test: setup ## Run every test that this machine can run, and say what was left out
	@hack/test

test-chaos: setup ## Break the local cluster in every way, and print what users saw (minutes)
	@hack/test-chaos

check: setup ## Format, lint, types, layering, generated files and the fast tests
	@$(STEP) "ruff format" $(BIN)/ruff format --check .
	@$(STEP) "ruff check" $(BIN)/ruff check .
	@$(STEP) "mypy" $(BIN)/mypy
	@$(STEP) "import-linter" $(BIN)/lint-imports
	@$(STEP) "generated CRD" $(BIN)/python -m kvscaler_api.generate --check
	@$(BIN)/python -m pytest -q -m "not apiserver and not cluster and not model and not chaos"

bench: setup ## Run every benchmark; JSON goes to build/bench/, floors are checked
	@hack/bench

crds: setup ## Generate the CRD from the pydantic models
	@$(STEP) "generate CRD" $(BIN)/python -m kvscaler_api.generate

requirements: setup ## Compile the pins in requirements/ from pyproject.toml
	@$(STEP) "pins" hack/compile-requirements "$(abspath $(BIN)/uv)"

clean: cluster-down ## Remove build results and the virtual environment (caches stay)
	@rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf -- *.egg-info
