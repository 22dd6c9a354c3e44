# Everything a fresh machine needs: Python 3.11 or newer, git, make and a C compiler.
PYTHON ?= python3
# Pinned, so that pip takes one build of torch for good; see the README for a CPU-only one.
TORCH ?= torch==2.13.0
# Virtual ones; without optimisation, compiling takes half the time.
EIGHT_DEVICES := --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0
PIP := .venv/bin/python -m pip --disable-pip-version-check -q
PIP_TORCH_XLA := .venv-torch_xla/bin/python -m pip --disable-pip-version-check -q

.PHONY: run test lint clean chromium

run: .venv/.run
	JAX_PLATFORMS=cpu .venv/bin/hfax generate demo "Return a new list" --seed 1 --max-new-tokens 60

test: .venv/.test .venv-torch_xla/.test | chromium
	JAX_PLATFORMS=cpu .venv/bin/python -m pytest
	JAX_PLATFORMS=cpu XLA_FLAGS='$(EIGHT_DEVICES)' .venv/bin/python -m pytest tests/sharding
	for file in tests/torch_xla/test_*.py; do .venv-torch_xla/bin/python -m pytest $$file || exit 1; done

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python src

# The chat page is tested in a browser without a window.
chromium:
	command -v chromium || command -v google-chrome || { apt-get update -qq && apt-get install -y -qq chromium; }

clean:
	rm -rf .venv .venv-torch_xla

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.run: pyproject.toml | .venv/bin/python
	$(PIP) install '$(TORCH)'
	$(PIP) install -e '.[cpu]'
	touch $@

.venv/.test: .venv/.run
	$(PIP) install -e '.[cpu,dev]'
	touch $@

# torch_xla needs exactly the torch that it was built against, so it has an environment of its own (7 GB).
.venv-torch_xla/bin/python:
	$(PYTHON) -m venv .venv-torch_xla

.venv-torch_xla/.test: pyproject.toml | .venv-torch_xla/bin/python
	$(PIP_TORCH_XLA) install -e '.[torch-xla,dev-torch-xla]'
	touch $@
