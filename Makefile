# Mayfly's commands; `make help` lists them. Plain enough for macOS's GNU make 3.81.
#
# The environment lies in .venv. What was installed into it is remembered by stamps inside it,
# so that a second run of any command starts at once.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCK := requirements.lock

# Overrides: PYTHON=python3.12, EXTRA=cpu|cuda12|cuda13 (Linux), ARGS="..." for the command run.
PYTHON ?=
EXTRA ?=
ARGS ?=
# Tests wait more than they compute: more of them at a time than there are cores. FLEET=1 has `make
# test` and `make coverage` run the tests of several machines, too (Linux, as root).
TEST_JOBS ?= 4
FLEET ?=

# Files in their order in the tree: those of a folder share servers, which end where the next file
# is of another folder.
TESTS := -m "not long and not gpu and not agents$(if $(FLEET),, and not fleet)" \
	-n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# Tests start hundreds of Python processes. Without bytecode each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

MADE := $(VENV)/.made
RUNTIME := $(VENV)/.runtime$(addprefix -,$(EXTRA))
DEV := $(VENV)/.dev

.PHONY: help serve test test-fast coverage test-fleet test-long test-gpu test-agents lint format bench docs dashboards models metrics lock wheel hooks clean distclean
.DELETE_ON_ERROR:

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

serve: $(RUNTIME) ## Serve the demo model on 127.0.0.1:8000 (other: ARGS="MODEL --port 9000")
	@$(BIN)/mayfly serve $(ARGS)

test: $(DEV) ## Run the tests that CI runs
	$(BIN)/python -m pytest $(TESTS) $(ARGS)

test-fast: $(DEV) ## Run the unit tests that start no process and compute little: a minute
	$(BIN)/python -m pytest tests/unit -m "not process and not heavy and not long" \
		-n $(TEST_JOBS) --dist worksteal $(ARGS)

coverage: $(DEV) ## Run what `make test` runs, and say which lines and branches they reach in any process
	$(BIN)/python -m pytest $(TESTS) --cov --cov-report=term:skip-covered $(ARGS)

test-fleet: $(DEV) ## Run the tests of several machines, as network namespaces (Linux, as root)
	$(BIN)/python -m pytest tests/fleet -m "fleet and not long" -rs $(ARGS)

test-long: $(DEV) ## Run the tests that are too long for CI
	$(BIN)/python -m pytest -m "long and not gpu" $(ARGS)

bench: $(RUNTIME) ## Measure speed beside mlx-lm (ARGS="MODEL_FOLDER --concurrency 1 8 32")
	$(BIN)/python bench/speed.py $(ARGS)

dashboards: $(DEV) ## Write Grafana's dashboards anew, from grafana/generate.py
	$(BIN)/python grafana/generate.py

models: $(DEV) ## Compare every model module of mlx-lm with the engine, in a table (ARGS="llama mamba2")
	$(BIN)/python scripts/manual/model_table.py $(ARGS)

metrics: $(DEV) ## Write the tables of docs/metrics.md anew, from the metrics
	$(BIN)/python scripts/manual/metric_tables.py

test-gpu: $(DEV) ## Run the tests that need an NVIDIA GPU, and print what they measured
	$(BIN)/python -m pytest -m gpu -n0 -s $(ARGS) tests/gpu

test-agents: $(DEV) ## Run released agents and SDKs against a scripted model (fetched once by npm, 1.4 GB)
	$(BIN)/python -m pytest tests/agents tests/conformance/test_sdk_sessions.py -m agents -n 2 --dist loadfile --durations 20 $(ARGS)

lint: $(DEV) ## Check style, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy --follow-imports silent bench
	$(BIN)/lint-imports

format: $(DEV) ## Rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DEV) ## Build the manual into build/manual
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lock: ## Resolve requirements.lock anew, for every platform
	@python="$$(PYTHON='$(PYTHON)' scripts/find-python)" && PYTHON="$$python" scripts/lock $(LOCK)

wheel: $(DEV) ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build

hooks: $(DEV) ## Have git run `make lint`'s checks before each commit
	$(BIN)/pre-commit install

clean: ## Remove what tests and tools left
	rm -rf dist build htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find protocol worker server tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV)

$(MADE):
	@python="$$(PYTHON='$(PYTHON)' scripts/find-python)" \
		&& echo "Making $(VENV) with $$python" \
		&& "$$python" -m venv $(VENV)
	@# Dependency groups came with pip 25.1.
	@$(PIP) install --quiet --upgrade "pip>=25.1"
	@touch $@

$(RUNTIME): $(MADE) pyproject.toml $(LOCK)
	@extra="$$(test -n '$(EXTRA)' && echo '$(EXTRA)' || scripts/choose-extra)" \
		&& echo "Installing Mayfly$${extra:+ with the extra $$extra} (a minute or so the first time)" \
		&& $(PIP) install --quiet --constraint $(LOCK) --editable ".$${extra:+[$$extra]}"
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing the development tools"
	@$(PIP) install --quiet --constraint $(LOCK) --group dev
	@touch $@
