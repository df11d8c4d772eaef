# Thin targets: each sets up what it needs. `make help` lists them.
VENV ?= .venv
BIN := $(VENV)/bin
# Kernel threads that wait by sleeping: libgomp's spinning turns a 1 s step into 9 s on a busy machine.
QUIET := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0 TOKENIZERS_PARALLELISM=false
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-kernels test-containers test-images test-vm engine images docs lint format system-packages container-packages vm-packages clean

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

# The command-line tools of the environment (ansible, molecule) are found by name, as a user finds them.
PYTEST := PATH="$(abspath $(BIN)):$$PATH" $(QUIET) OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Three processes for two cores: much of what roles and fleets do is waiting. Files in order: the long ones of tests/roles
# come early and not last, when one process would be left alone.
test: lint  ## lint, types and every test that needs no engine, VM or GPU
	$(PYTEST) -m 'not containers and not faults and not images and not vm and not engine and not kernels' -n 3 --dist loadfile --no-loadscope-reorder --durations 15 $(PYTEST_ARGS)

# Triton apart from the environment: 700 MB that only these tests want.
KERNELS := .venv-kernels
$(KERNELS)/.installed: constraints.txt | $(STAMP)
	rm -rf $(KERNELS)
	$(BIN)/python -m pip install --quiet --no-deps --target $(KERNELS) --constraint constraints.txt triton
	touch $@

test-kernels: $(KERNELS)/.installed  ## our GPU kernels without a GPU: interpreted on the CPU, compiled for an RTX 3090 and an H200
	PYTHONPATH=$(KERNELS) TRITON_INTERPRET=1 $(PYTEST) -n 2 -rs --durations 5 $(PYTEST_ARGS) tests/gpu/test_gdn_triton.py
	PYTHONPATH=$(KERNELS) $(PYTEST) -n 2 -m kernels -rs --durations 5 $(PYTEST_ARGS) tests/unit/decode

test-containers: $(STAMP)  ## roles and jobs on real distributions in Docker containers, faults of a fleet (root; see container-packages)
	$(PYTEST) -m 'containers or faults' -rs --durations 15 $(PYTEST_ARGS)

test-images: $(STAMP)  ## the CPU images built and run (root; see container-packages)
	$(PYTEST) -m images -rs --durations 5 $(PYTEST_ARGS)

test-vm: $(STAMP)  ## provisioning of a virtual machine with an IOMMU, vfio, DKMS and LXC (root; see vm-packages)
	$(PYTEST) -m vm -rs -n 2 --dist loadfile --durations 15 $(PYTEST_ARGS) tests/vm

images: $(STAMP)  ## the images for a CPU (CA_BUNDLE=FILE, PIP_CONF=FILE: optional build secrets)
	$(BIN)/python docker/build.py base-cpu extract-cpu train-cpu

engine: $(STAMP)  ## a real engine on the CPU: canary and sweep with an exported drafter
	PATH="$(abspath $(BIN)):$$PATH" tests/engine/install.sh .venv-engine .venv-load
	$(PYTEST) -m engine -rs --durations 5 $(PYTEST_ARGS)

docs: $(STAMP)  ## these documents as a site in build/docs, strictly checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd ansible/module_utils && $(abspath $(BIN))/mypy --strict --cache-dir ../../.mypy_cache gpu_host

format: $(STAMP)  ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

APT := apt-get install -y -qq --no-install-recommends

system-packages:  ## as root on Debian or Ubuntu: what `make test` uses beside Python (those tests are skipped without it)
	apt-get update -qq
	$(APT) chromium curl fonts-dejavu-core haproxy iproute2 openssh-client openssh-server rsync util-linux

container-packages:  ## as root on Debian or Ubuntu: what `make test-containers` uses
	apt-get update -qq
	$(APT) docker.io mmdebstrap openssh-client

vm-packages:  ## as root on Debian or Ubuntu: what `make test-vm` uses
	apt-get update -qq
	$(APT) e2fsprogs mmdebstrap openssh-client qemu-system-x86 qemu-utils

clean:  ## remove the environment, caches and demo runs
	rm -rf $(VENV) .venv-engine .venv-load $(KERNELS) build runs/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
