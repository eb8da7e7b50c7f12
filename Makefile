# Everything a newcomer needs. Each target sets up its own environment; a second run is quick.
#
#   make demo        plain and speculative decoding of the real model, side by side, with proof of identity
#   make test        the whole test suite
#   make check       format, lint, types and tests: what must pass before a change lands
#   make lint        format, lint and types only
#   make mutants     faults planted in the real code, each of which the suite must reject
#   make bench       the speed table (minutes; wants an idle machine)
#   make scenarios   acceptance scenarios on the real model at full size (half an hour)
#   make gpu-check   identity, pass times and memory on a CUDA device (under five minutes)
#   make neon-check  the ARM kernels, cross-compiled, on an emulated processor (two minutes; needs two Debian packages)
#   make clean       remove the environments and caches

PYTHON ?= python3
WORKERS ?= 2
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
SCENARIO_ARGS ?=
GPU_ARGS ?=

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find src -type f -not -name '*.pyc') $(wildcard hatch_build.py)
# What an editable installation compiles once.
COMPILED := $(shell find src -path '*/csrc/*') $(wildcard hatch_build.py)

.PHONY: demo test check lint mutants bench scenarios gpu-check neon-check clean
.DEFAULT_GOAL := demo

# The demo runs what a user gets: the installed package. The stamp is renewed when a source file changes.
.venv/installed: pyproject.toml constraints.txt $(SOURCES)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) .
	touch $@

# Developers' environment: editable, so that only a change of dependencies renews the stamp.
.venv-dev/installed: pyproject.toml constraints.txt $(COMPILED)
	test -x .venv-dev/bin/python || $(PYTHON) -m venv .venv-dev
	.venv-dev/bin/python $(PIP_INSTALL) -e '.[dev]'
	touch $@

demo: .venv/installed
	.venv/bin/outrider demo $(DEMO_ARGS)

test: .venv-dev/installed
	.venv-dev/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TEST_ARGS)

check: .venv-dev/installed
	PATH="$(CURDIR)/.venv-dev/bin:$$PATH" scripts/check

lint: .venv-dev/installed
	PATH="$(CURDIR)/.venv-dev/bin:$$PATH" scripts/check --lint

mutants: .venv-dev/installed
	.venv-dev/bin/python -m pytest -n $(WORKERS) tests/mutants

bench: .venv-dev/installed
	.venv-dev/bin/python -m benchmarks.engine_speed $(BENCH_ARGS)

scenarios: .venv-dev/installed
	.venv-dev/bin/python -m benchmarks.scenarios $(SCENARIO_ARGS)

gpu-check: .venv-dev/installed
	.venv-dev/bin/python -m benchmarks.gpu_check $(GPU_ARGS)

# In the suite these tests are skipped where the tools are missing; here that is an error.
neon-check:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { echo "make neon-check needs the Debian packages g++-aarch64-linux-gnu and qemu-user" >&2; exit 1; }
	@$(MAKE) .venv-dev/installed
	.venv-dev/bin/python -m pytest tests/native/test_neon.py

clean:
	rm -rf .venv .venv-dev build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
