# `make` lists the targets. Every target that needs the environment sets it up first; nothing is installed twice.

VENV   := .venv
BIN    := $(VENV)/bin
# PyTorch's own CPU wheels, a tenth of the size of the CUDA build that a plain `pip install torch` may give.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# The interpreter of an earlier set-up stays the choice until PYTHON names another.
ifndef PYTHON
PYTHON := $(or $(shell cat $(VENV)/.python 2>/dev/null),python3)
endif
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# cpu or cuda.
ifndef FLAVOUR
FLAVOUR := $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU '),cuda,cpu)
endif

# The stamp is the last thing an install writes; its name says what was installed. Content counts, not time, so a fresh
# checkout of the same files installs nothing; an interrupted install has no stamp and starts again.
INPUTS := pyproject.toml $(wildcard requirements/*.txt packaging/*/pyproject.toml)
READY  := $(VENV)/.ready-$(FLAVOUR)-$(PYTHON_VERSION)-$(shell cat $(INPUTS) | sha256sum | cut -c 1-12)

# Test workers: one thread each, so as many as there are cores; one on a GPU machine, where they would share the GPU.
ifndef JOBS
JOBS := $(if $(filter cuda,$(FLAVOUR)),0,$(shell n=$$(nproc); echo $$((n < 8 ? n : 8))))
endif
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-gpu compare check format hooks clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F '|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo '  ARGS="..." goes to the script or to pytest; PYTHON=python3.12 and FLAVOUR=cpu|cuda override what is found.'

setup: $(READY)  ## .venv with the matching versions, CPU or CUDA

# One thread: the operations of a model this small are shorter than it takes to share them out.
train: $(READY)  ## train the GEM-like model on MovieLens-100K and print its table
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python examples/train_gem.py $(ARGS)

test: $(READY)  ## every test that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-gpu: $(READY)  ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

compare: $(READY)  ## the GEM-like model against its baselines, three seeds each (up to 45 minutes on 2 cores)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/compare.py $(ARGS)

check: $(READY)  ## formatting, lint and types, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(READY)  ## run the checks before each git commit
	$(BIN)/pre-commit install

clean:  ## remove the environment and every cache; runs/ and data/ stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch comes first and alone: only this step may look at the extra index, and only briefly, so a machine that cannot
# reach it goes on with the default one. Triton comes last: it replaces the files of the `triton` of a CUDA torch.
$(READY):
	@sh tools/check_machine.sh '$(PYTHON)'
	@echo 'Setting up $(VENV): $(FLAVOUR), Python $(PYTHON_VERSION). This takes a few minutes, once.'
	@rm -f $(VENV)/.ready-*
	$(PYTHON) -m venv --clear $(VENV)
	@$(PYTHON) -c 'import sys; print(sys.executable)' > $(VENV)/.python
ifeq ($(FLAVOUR),cuda)
	$(BIN)/pip install -q --no-compile --no-deps -c requirements/common.txt torch
else
	$(BIN)/pip install -q --no-compile --no-deps -c requirements/common.txt --retries 0 --timeout 5 --extra-index-url $(TORCH_CPU_INDEX) torch \
	|| $(BIN)/pip install -q --no-compile --no-deps -c requirements/common.txt torch
endif
	$(BIN)/pip install -q --no-compile -c requirements/common.txt hatchling
ifeq ($(FLAVOUR),cuda)
	$(BIN)/pip install -q --no-compile -r requirements/cuda.txt
else
	$(BIN)/pip install -q --no-compile --no-build-isolation -r requirements/cpu.txt ./packaging/fbgemm-gpu
endif
	$(BIN)/pip install -q --no-compile --no-deps -r requirements/triton.txt
	$(BIN)/pip install -q --no-compile --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'import torch, fbgemm_gpu, torchrec, triton; print("torch", torch.__version__, "torchrec", torchrec.__version__, "triton", triton.__version__)'
	@touch $@
