# Two commands for a bare machine: `make demo` and `make test`. Both set themselves up in .venv/, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check format docs bench-peers clean

demo: $(VENV)/.core
	$(BIN)/burnish demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout=1800

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	$(BIN)/python -m burnish.config.docs > docs/config.md

# What benchmarks run beside burnish, each in an environment of its own: 5 GB.
bench-peers: .peers/vllm/.done .peers/trl/.done

.peers/vllm/.done: benchmarks/peers/install.sh
	bash benchmarks/peers/install.sh $(PYTHON)

.peers/trl/.done: benchmarks/peers/install_trl.sh
	bash benchmarks/peers/install_trl.sh $(PYTHON)

clean:
	rm -rf $(VENV) runs checkpoints .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# torch comes first and from the constraints, so that no later requirement picks another build of it.
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "burnish needs Python 3.11 or newer; name one with make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
