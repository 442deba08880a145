# Builds, tests and demonstrates amp_ext in an environment of its own (.venv).

SEEDS ?= 1
MINUTES ?= 30
BASE_PYTHON ?= python3
TORCH ?= 2.11.0
LIST ?= kernels
FOLDER ?= results/gpu_check-$(LIST)
RESULTS ?= results/peers

PATH_BEFORE := $(PATH)
ifdef PYTHON
INSTALLED :=
DOCS_INSTALLED :=
BUILT := build-in-place
else
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
BUILT := .venv/.built
endif
# Tests run side by side where pytest-xdist is installed, which is asked when they are to start.
WORKERS := -n auto --maxprocesses 8 --dist worksteal
PARALLEL = $(shell $(PYTHON) -c 'import xdist' 2> /dev/null && echo '$(WORKERS)')
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

HAS_NVCC = $(CUDA_HOME)$(CUDA_PATH)$(shell command -v nvcc /usr/local/cuda/bin/nvcc)

SOURCES := setup.py $(shell find csrc) $(wildcard amp_ext/share/cmake/amp_ext/*.in)
CXX_FILES := $(shell find csrc tests benchmarks examples \
    -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

SHELL := /bin/bash
COMMA := ,

.DELETE_ON_ERROR:
.PHONY: help demo demo-cpp examples docs test test-quick test-numbers test-clients bench-peers fuzz stress sanitize compilers lint format build build-in-place cuda-build test-torch gpu-check cmake-routes wheel clean

help:  ## Shows this list
	@echo 'make TARGET                 in .venv, created with $$BASE_PYTHON ($(BASE_PYTHON)) when missing'
	@echo 'make TARGET PYTHON=python   in that environment as it is; nothing is installed'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(BUILT)  ## Trains the photo example; SEEDS=3 repeats it with three seeds
	@$(PYTHON) examples/photo.py --seeds $(SEEDS)

demo-cpp: $(BUILT)  ## Trains it by a C++ program, built with CMake; EXAMPLE_ARGS=--quick is short
	@PYTHON=$(PYTHON) examples/libtorch/demo.sh $(EXAMPLE_ARGS)

examples: $(BUILT)  ## Runs the other examples, some minutes; EXAMPLE_ARGS=--quick makes them short
	@for example in low_memory char_gpt two_optimizers guarded_gpt released_gradients; do \
	    $(PYTHON) examples/$$example.py $(EXAMPLE_ARGS) || exit 1; done

docs: $(BUILT) $(DOCS_INSTALLED)  ## Builds the documentation: build/docs/index.html
	@$(PYTHON) -m sphinx -q -W --keep-going -n -b html docs build/docs
	@echo 'Written: build/docs/index.html'

test: $(BUILT)  ## Runs the tests; PYTEST_ARGS='-k adam' chooses
	@$(PYTHON) -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-quick: $(BUILT)  ## Runs those that are not slow: no emulated rows, no programs
	@$(PYTHON) -m pytest $(PARALLEL) -m 'not slow' -k 'not emulated' $(PYTEST_ARGS)

test-numbers: $(BUILT)  ## Stores and loads every float32 as engine and kernels do, over an hour
	@AMP_EXT_NUMBER_STRIDE=1 $(PYTHON) -m pytest $(PARALLEL) --durations 4 tests/kernels/test_numbers.py \
	    $(PYTEST_ARGS)

fuzz: $(BUILT)  ## Looks for programs whose results differ from torch's; MINUTES=30, FUZZ_ARGS='--seed 1'
	@$(PYTHON) scripts/fuzz.py --minutes $(MINUTES) $(FUZZ_ARGS)

stress: $(BUILT)  ## Takes steps of unusual size and number, with 9 GB of memory; STRESS_ARGS=--small
	@$(PYTHON) scripts/stress.py $(STRESS_ARGS)

sanitize: $(INSTALLED)  ## Runs them with sanitizers in the CPU engine and the emulated kernels
	@PYTHON=$(PYTHON) WORKERS='$(PARALLEL)' scripts/sanitize.sh $(PYTEST_ARGS)

compilers: $(BUILT)  ## Compares the bits of its CPU engines with clang's, minutes; COMPILER_ARGS=--x86-64
	@PATH='$(PATH_BEFORE)' BASE_PYTHON=$(BASE_PYTHON) scripts/other_compilers.sh $(COMPILER_ARGS)

lint: $(INSTALLED)  ## Checks format, style, types and the direction of includes and imports
	@$(PYTHON) -m ruff format --check --quiet
	@$(PYTHON) -m ruff check --quiet
	@clang-format --dry-run -Werror $(CXX_FILES)
	@$(PYTHON) scripts/check_layers.py
	@$(PYTHON) -m mypy

format: $(INSTALLED)  ## Formats all sources
	@$(PYTHON) -m ruff format
	@$(PYTHON) -m ruff check --fix
	@clang-format -i $(CXX_FILES)

build: $(BUILT)  ## Builds the extension in place

# These use the extension built in the checkout if it fits the environment's PyTorch. They leave the checkout,
# which would hide the installed package.
test-clients: $(BUILT)  ## Tests with Accelerate, Lightning, Transformers and others in .venv-clients
	@export PATH='$(PATH_BEFORE)' BASE_PYTHON=$(BASE_PYTHON) HF_HUB_OFFLINE=1 AMP_EXT_REQUIRE_CLIENTS=1; \
	set -eo pipefail; source scripts/own_environment.sh; \
	make_environment .venv-clients requirements-clients.txt; provide_extension; cd $$home; \
	$$python -m pytest $(CURDIR)/tests/clients -p no:cacheprovider $(PYTEST_ARGS)

# DeepSpeed builds its extension in the environment at first use, and torchao compiles for each shape.
bench-peers: $(BUILT)  ## Times it beside DeepSpeed and others in .venv-peers; RESULTS=, BENCH_ARGS=--quick, TEST=1
	@export BASE_PYTHON=$(BASE_PYTHON) DS_BUILD_OPS=0 AMP_EXT_REQUIRE_PEERS=1; \
	export PATH='$(PATH_BEFORE)' TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-peers/extensions; \
	export TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.venv-peers/inductor; \
	set -eo pipefail; source scripts/own_environment.sh; \
	make_environment .venv-peers requirements-peers.txt; provide_extension; \
	PATH=$(CURDIR)/$$home/bin:$$PATH; cd $$home; \
	$$python $(if $(TEST),-m pytest $(CURDIR)/tests/programs/test_bench{$(COMMA)_peers}.py -p no:cacheprovider,\
	    $(CURDIR)/benchmarks/peers.py --out $(abspath $(RESULTS))) $(BENCH_ARGS)

# Neither uses .venv: they make an environment for each PyTorch.
cuda-build:  ## Builds for CUDA in .venv-torch and tests that without a GPU; TORCH=2.15.0 chooses
	@PATH='$(PATH_BEFORE)' TORCH=$(TORCH) scripts/cuda_build.sh $(WORKERS)

test-torch:  ## Runs the quick tests with another PyTorch, in .venv-torch; TORCH=2.15.0 chooses
	@PATH='$(PATH_BEFORE)' TORCH=$(TORCH) scripts/test_torch.sh $(WORKERS) $(PYTEST_ARGS)

wheel: $(if $(TORCHES),,$(INSTALLED))  ## Builds a wheel into dist/ and tries it; TORCHES='2.13.0 2.14.1' for several releases
	@$(if $(TORCHES),PATH='$(PATH_BEFORE)' TORCHES='$(TORCHES)') PYTHON=$(PYTHON) scripts/wheel.sh

# The first way has the sources in the program's project, the second way installs the library to a prefix and
# finds it without environment variables. tests/programs/test_cmake.py tests the library of the Python package.
MAX_JOBS ?= $(shell nproc)
CMAKE = $(shell command -v cmake)
SMOKE = $(CMAKE) -S tests/cpp/smoke -B build/cmake_routes
TORCH_FOLDER = $(shell $(PYTHON) -c 'import torch; print(torch.__path__[0])')
cmake-routes: $(INSTALLED)  ## Builds a program in C++ on the ways that compile the library again; minutes
	@rm -rf build/cmake_routes
	@$(SMOKE)/inside -DAMP_EXT_SOURCES=$(CURDIR) -DCMAKE_PREFIX_PATH=$(TORCH_FOLDER)
	@cmake --build build/cmake_routes/inside -j $(MAX_JOBS)
	@build/cmake_routes/inside/smoke
	@cmake -S . -B build/cmake_routes/library -DCMAKE_PREFIX_PATH=$(TORCH_FOLDER) \
	    -DCMAKE_INSTALL_PREFIX=build/cmake_routes/prefix
	@cmake --build build/cmake_routes/library -j $(MAX_JOBS)
	@cmake --install build/cmake_routes/library
	@env -i PATH="$$(getconf PATH)" $(SMOKE)/outside \
	    "-DCMAKE_PREFIX_PATH=$(CURDIR)/build/cmake_routes/prefix;$(TORCH_FOLDER)"
	@env -i PATH="$$(getconf PATH)" $(CMAKE) --build build/cmake_routes/outside
	@env -i build/cmake_routes/outside/smoke

gpu-check:  ## Checks and times on a GPU, in the present environment; LIST=kernels, training, offload, muon or tests
	@PATH='$(PATH_BEFORE)' PYTHON=$(if $(INSTALLED),$(BASE_PYTHON),$(PYTHON)) \
	    scripts/gpu_check.sh --list $(LIST) $(FOLDER)

clean:  ## Removes what was built; the .venv folders stay
	@rm -rf build dist *.egg-info .venv/.built* \
	    amp_ext/_C.*.so amp_ext/lib amp_ext/_build_info.json amp_ext/share/cmake/amp_ext/amp_extBuild.cmake
	@find amp_ext tests examples scripts -name __pycache__ -prune -exec rm -rf {} +

.venv/.installed: requirements.txt
	@$(BASE_PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed, \
	$(BASE_PYTHON) is " + sys.version.split()[0] + ": make BASE_PYTHON=python3.11")'
	@echo 'Installing PyTorch and the tools into .venv (once, some minutes)'
	@$(BASE_PYTHON) -m venv .venv
	@.venv/bin/python scripts/progress.py build/install.log \
	    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r requirements.txt
	@touch $@

.venv/.docs-installed: requirements-docs.txt .venv/.installed
	@.venv/bin/python scripts/progress.py build/install.log \
	    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r requirements-docs.txt
	@touch $@

# .venv has whatever PyTorch pip brings, so on a machine without nvcc the build is for the CPU alone. In an
# environment of the user's, the build stops there and tells how to get the compiler.
define build_extension
	@echo 'Building the extension (log: build/build.log)'
	@$(if $(INSTALLED),AMP_EXT_CUDA="$${AMP_EXT_CUDA:-$(if $(HAS_NVCC),,0)}") $(PYTHON) scripts/progress.py build/build.log $(PYTHON) setup.py build_ext --inplace
	@grep '^amp_ext:' build/build.log
endef

.venv/.built: .venv/.installed $(SOURCES)
	@touch $@.new
	$(build_extension)
	@mv $@.new $@

# The present environment may have changed since the last build: setup.py and ninja look themselves.
build-in-place:
	@rm -f .venv/.built
	$(build_extension)
