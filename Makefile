# Thin targets: each sets up what it needs. `make help` lists them.
VENV ?= .venv
BIN := $(VENV)/bin
# Kernel threads that wait by sleeping: libgomp's spinning turns a 1 s step into 9 s on a busy machine.
QUIET := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format system-packages clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

install: $(STAMP)  ## virtual environment with the pinned requirements

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## the whole loop on this machine, report in runs/demo (FROM_SCRATCH=1 trains the target too)
	$(QUIET) $(BIN)/drafthouse demo $(if $(FROM_SCRATCH),--from-scratch) $(DEMO_ARGS)

test: lint  ## lint, types and every test that needs no engine, VM or GPU
	$(QUIET) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations 15 $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

system-packages:  ## as root on Debian or Ubuntu: what the browser tests use (they are skipped without it)
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core

clean:  ## remove the environment, caches and demo runs
	rm -rf $(VENV) build runs/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
