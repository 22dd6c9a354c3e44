# Everything a fresh machine needs: Python 3.11 or newer, git, make and a C++ compiler.
PYTHON ?= python3
# Pinned, so that pip takes one build of torch for good.
TORCH ?= torch==2.13.0
# PyTorch's own index of builds without CUDA; asked first, for a few seconds, since pip's usual torch for Linux brings gigabytes of CUDA.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Processes that share a test run.
WORKERS ?= auto

PIP := .venv/bin/python -m pip --disable-pip-version-check
PIP_TORCH_XLA := .venv-torch_xla/bin/python -m pip --disable-pip-version-check
# OpenMP's threads wait busily for each other, which costs more than they bring where every core has a worker.
PLATFORMS := cpu
PYTEST = OMP_NUM_THREADS=1 JAX_PLATFORMS=$(PLATFORMS) HFAX_TESTS_HOME=build/hfax .venv/bin/python -m pytest --junitxml=build/tests/$@.xml -n $(WORKERS) --dist worksteal
EIGHT_DEVICES := HFAX_TESTS_DEVICES=8
JOBS := test-torch_xla test-tpu_compile test-gpu_compile test-multiprocess test-browser test-docs test-sweep

# Installs packages of the system, as root or by asking for it.
APT := $(if $(filter 0,$(shell id -u)),,sudo )apt-get

.PHONY: run docs test test-parity test-sharding lint check test-all test-jobs $(JOBS) test-gpu test-asan wheel clean chromium qemu

run: .venv/.run
	@echo "First use compiles hfax's C++ kernels (about 20 s) and the model's programs (about 4 s); both are kept."
	JAX_PLATFORMS=cpu .venv/bin/hfax generate demo "Return a new list" --seed 1 --max-new-tokens 60

# What every change must pass.
check: lint test

test: .venv/.test
	$(PYTEST) --ignore tests/parity
	$(MAKE) test-parity test-sharding

# Models beside plain transformers: programs are compiled as users compile them, unlike in the other tests (tests/conftest.py).
test-parity: .venv/.test
	XLA_FLAGS= $(PYTEST) tests/parity

# Meshes of eight virtual devices.
test-sharding: .venv/.test
	$(EIGHT_DEVICES) $(PYTEST) tests/sharding

lint: .venv/.lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python src tests/typing

# Everything there is: `make test`, and the jobs, which may run side by side on several machines.
test-all: test test-jobs

test-jobs: $(JOBS)

test-tpu_compile: .venv/.test
	$(PYTEST) -m tpu_compile

# JAX's CUDA plugin lies beside the environment: in it, JAX would search for a GPU in every other test.
test-gpu_compile: .venv/.test build/gpu-compiler
	PYTHONPATH=build/gpu-compiler $(PYTEST) -m gpu_compile

test-multiprocess: .venv/.test-multiprocess
	$(PYTEST) -m multiprocess

test-browser: .venv/.test-browser | chromium
	$(PYTEST) -m browser

# Every notebook is executed again; programs are compiled as users compile them.
test-docs: .venv/.test-docs | chromium
	rm -rf build/tutorial
	.venv/bin/mkdocs build
	XLA_FLAGS= $(PYTEST) -m docs

test-sweep: .venv/.test-sweep | qemu
	$(PYTEST) -m sweep
	$(EIGHT_DEVICES) $(PYTEST) --junitxml=build/tests/$@-sharding.xml -m sweep tests/sharding

# On a machine with an NVIDIA GPU: the kernels, and models beside plain transformers. Not one of the jobs: CI has no GPU.
test-gpu: PLATFORMS := cuda,cpu
test-gpu: .venv/.test-gpu
	XLA_FLAGS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) tests/kernels/test_gpu_kernels.py tests/parity

# The CPU kernels with AddressSanitizer, under their own tests. Not one of the jobs: it runs the same tests again.
test-asan: .venv/.test
	CXX=$(CURDIR)/scripts/c++-asan LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 $(PYTEST) tests/kernels tests/engine/test_batch_invariance.py tests/parity tests/train

# A process for each file: devices are set up once in a process.
test-torch_xla: .venv-torch_xla/.test
	for file in tests/torch_xla/test_*.py; do \
		.venv-torch_xla/bin/python -m pytest --junitxml=build/tests/$@-$$(basename $$file .py).xml $$file || exit 1; \
	done

# The chat page is tested in a browser without a window.
chromium:
	command -v chromium || command -v google-chrome || { $(APT) update -qq && $(APT) install -y -qq chromium; }

# The CPU kernels for arm64 are tested in an emulator.
qemu:
	case "$$(uname -m)" in aarch64|arm64) ;; *) command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++ \
		|| { $(APT) update -qq && $(APT) install -y -qq qemu-user g++-aarch64-linux-gnu libc6-dev-arm64-cross; } ;; esac

# The documentation's site, in build/site. Notebooks that have not changed are not executed again.
docs: .venv/.docs
	.venv/bin/mkdocs build

# With compiled CPU kernels, for this machine's platform.
wheel: .venv/bin/python
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv-torch_xla build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.torch: | .venv/bin/python
	@echo "Installing $(TORCH): 200 MB of PyTorch without CUDA where PyTorch's own index answers, else pip's usual build."
	if [ "$$(uname -s)" != Linux ] \
		|| ! $(PIP) install --timeout 5 --retries 0 --index-url '$(TORCH_CPU_INDEX)' '$(TORCH)'; then \
		echo "Taking pip's usual build."; \
		$(PIP) install '$(TORCH)'; \
	fi
	touch $@

.venv/.run: pyproject.toml | .venv/.torch
	@echo "Installing hfax with JAX and transformers (300 MB, about a minute)."
	$(PIP) install -e '.[cpu]'
	touch $@

.venv/.test: .venv/.run
	@echo "Installing what the tests need (700 MB, about a minute)."
	$(PIP) install -e '.[cpu,test]'
	touch $@

.venv/.docs: .venv/.run
	$(PIP) install -e '.[cpu,docs]'
	touch $@

.venv/.lint .venv/.test-multiprocess .venv/.test-browser .venv/.test-docs .venv/.test-sweep .venv/.test-gpu: .venv/.%: .venv/.test
	$(PIP) install -e '.[cpu,$*]'
	touch $@

build/gpu-compiler: | .venv/.test
	@echo "Installing XLA's GPU compiler and NVIDIA's assembler (450 MB)."
	rm -rf $@ $@.part
	version=$$(.venv/bin/python -c "import importlib.metadata; print(importlib.metadata.version('jax'))") && \
		$(PIP) install --no-deps --target $@.part jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
			nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37
	mv $@.part $@

# torch_xla needs exactly the torch that it was built against, so it has an environment of its own (7 GB).
.venv-torch_xla/bin/python:
	$(PYTHON) -m venv .venv-torch_xla

.venv-torch_xla/.test: pyproject.toml | .venv-torch_xla/bin/python
	@echo "Installing torch_xla and its torch (7 GB, a few minutes)."
	$(PIP_TORCH_XLA) install -e '.[torch-xla,test-torch-xla]'
	touch $@
