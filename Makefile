# make serve: a server with the shipped checkpoint.  make test: the whole suite.  make lint: all linters.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= examples/glm_tiny/checkpoint
NAME ?= glm_tiny

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
SETUP_FILES := pyproject.toml setup.py constraints.txt
CPP_FILES = $(shell find cpp -name '*.cu' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.h' 2>/dev/null)

.PHONY: serve test lint install format clean

serve: $(VENV)/installed
	$(BIN)/trtllm-serve $(MODEL) --served_model_name $(NAME) --host $(HOST) --port $(PORT)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(CPP_FILES),$(BIN)/clang-format --dry-run --Werror $(CPP_FILES))

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP_FILES),$(BIN)/clang-format -i $(CPP_FILES))

install: $(VENV)/installed-dev

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Without build isolation setup.py sees what is installed, and can refuse to stand beside NVIDIA's wheel.
$(VENV)/installed: $(SETUP_FILES) | $(BIN)/python
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --no-build-isolation --editable '.[test,lint]'
	touch $@
