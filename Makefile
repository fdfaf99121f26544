# Two commands matter: `make demo` and `make test`. Both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_ENV := TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-seeds test test-slow test-triton check bench bench-loss docs clean

help:
	@echo "setup       .venv with the tested versions"
	@echo "demo        train a real 135M model on this CPU and print the verdict (ARGS=--full: with the controls)"
	@echo "demo-seeds  the demo with seeds 0, 1, 2, side by side"
	@echo "test        unit tests, quick ones (CI also runs test-slow)"
	@echo "test-triton the GPU kernel, interpreted and compiled; installs Triton (1 GB), needs no GPU"
	@echo "check       ruff, ruff format, pyright strict on src"
	@echo "bench       tokens/s of the sampler against model.generate"
	@echo "bench-loss  the loss kernel against TRL's, the products alone and dense autograd (25 minutes)"
	@echo "docs        build the documentation"
	@echo "clean       remove .venv and what was built"

setup: $(BIN)/.ready

$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: setup
	TOKENIZERS_PARALLELISM=false $(BIN)/opd demo $(ARGS)

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not triton' $(ARGS)

test-slow: setup
	$(TEST_ENV) $(BIN)/python -m pytest -m 'slow and not gpu and not triton' $(ARGS)

test-triton: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[triton]'
	$(TEST_ENV) $(BIN)/python -m pytest -m 'triton' $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

demo-seeds: setup
	for seed in 0 1 2; do TOKENIZERS_PARALLELISM=false $(BIN)/opd demo --seed $$seed || exit 1; done
	$(BIN)/opd verdicts runs/demo runs/demo-seed-1 runs/demo-seed-2

bench: setup
	$(BIN)/python benchmarks/rollout.py $(ARGS)

bench-loss: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/loss_kernel.py --page docs/performance.md $(ARGS)

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
