# On a fresh machine with Python >= 3.11 and make, `make demo` and `make test` do all their own set-up.
PYTHON ?= python3
VENV   ?= .venv
PINS   ?= constraints.txt
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NAME   ?= geometry

# oneDNN's bf16 path crashes on some CPUs that advertise AMX; this keeps it to instructions that work.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-full oldest lint docs bench clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

$(STAMP): pyproject.toml $(PINS)
	@echo "setup: creating $(VENV) and installing leafward with its dependencies (about 8 GB, some minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "leafward needs Python >= 3.11, found " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip -c $(PINS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS) -e '.[all,dev]'
	@touch $@
	@echo "setup: done; it is reused until pyproject.toml or $(PINS) change"

demo: $(STAMP)  ## set up, then run the main job on embedded data (offline)
	@echo "demo: running leafward demo"
	@OMP_NUM_THREADS=2 $(BIN)/leafward demo

test: $(STAMP)  ## set up, then run the test suite
	@echo "test: running pytest on two workers"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-full: $(STAMP)  ## the second tier of tests: every file operation, every layout; writes tests/FULL.json
	@echo "test-full: running pytest -m full on two workers"
	@$(BIN)/python -m pytest -m full --record -n 2 --dist worksteal --timeout 7200

oldest:  ## the test suite with the oldest PyTorch that is supported, in an environment of its own
	@$(MAKE) --no-print-directory test VENV=.venv-oldest PINS=constraints-oldest.txt

lint: $(STAMP)  ## formatting, lint, types and the import contract
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

docs: $(STAMP)  ## build the documentation into build/site; a warning is an error
	@$(BIN)/zensical build --strict --clean

bench: $(STAMP)  ## run one benchmark: make bench NAME=geometry
	@$(BIN)/leafward bench $(NAME)

clean:  ## remove the environment and caches (never runs or data)
	rm -rf $(VENV) .venv-oldest build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
