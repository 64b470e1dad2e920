# Commands for a bare machine: `make demo`, `make test`, `make test-vllm`. Each sets itself up in an environment of its own, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The lower end of pyproject.toml's range, and what is run there: what touches transformers, a few minutes of it.
OLDEST_TRANSFORMERS := 5.16.0
OLDEST_TESTS := $(addprefix tests/,$(addsuffix .py,model/test_load model/test_fused_layers model/test_packed_forward \
	model/test_head model/test_lora model/test_flops rollout/test_rollout_contract rollout/test_lora_rollout engine/test_checkpoint \
	workers/test_actor e2e/test_runs)) tests/render

# Files side by side, as many as there are cores, up to four; each with one thread for torch, which tiny models gain nothing from sharing.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile

.PHONY: demo test test-slow test-vllm test-oldest test-parity check format docs bench-peers clean

demo: $(VENV)/.core
	$(BIN)/burnish demo

test: $(VENV)/.dev
	@# Once, and not again in each of the hundreds of processes that tests start, where Python may not write what it compiles.
	$(BIN)/python -m compileall -q burnish
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout=1800

# burnish with vLLM on a CPU, in an environment of its own (3.5 GB).
test-vllm: .venv-vllm/.done
	.venv-vllm/bin/python -m pytest tests/vllm -m "not gpu" --timeout=600 --durations=10

# Estimators, losses, corrections and keys against verl's and TRL's functions, as PyPI has them (17 MB to fetch).
test-parity: $(VENV)/.dev .peers/parity/.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity -m parity --timeout=600

.peers/parity/.done: tests/parity/install.sh
	bash tests/parity/install.sh $(BIN)/python

# The core with the oldest transformers that it allows.
test-oldest: .venv-oldest/.done
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(SIDE_BY_SIDE) $(OLDEST_TESTS)
	.venv-oldest/bin/python -m pytest -m slow tests/cli/test_model_command.py

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
bench-peers: .peers/vllm/.done .peers/trl/.done .peers/verl/.done

.peers/vllm/.done: benchmarks/peers/install.sh
	bash benchmarks/peers/install.sh $(PYTHON)

.peers/trl/.done: benchmarks/peers/install_trl.sh
	bash benchmarks/peers/install_trl.sh $(PYTHON)

# Borrows torch and Ray from burnish's own environment.
.peers/verl/.done: benchmarks/peers/install_verl.sh $(VENV)/.dev
	bash benchmarks/peers/install_verl.sh $(BIN)/python

.venv-vllm/.done: tests/vllm/install.sh constraints-vllm.txt
	bash tests/vllm/install.sh .venv-vllm $(PYTHON)

.venv-oldest/.done: constraints.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	sed -e "s/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/" -e "/^huggingface_hub==/d" -e "/^hf-xet==/d" constraints.txt \
		> .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet -c .venv-oldest/constraints.txt torch
	.venv-oldest/bin/python -m pip install --quiet -c .venv-oldest/constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-oldest runs checkpoints .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

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
