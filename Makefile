# Three commands for a fresh machine that has Python 3.11 and pip, and nothing else:
#   make demo    train a small GPT with the probe on and show what it saw
#   make test    everything that must hold: format, lint, types, tests
#   make check   the quick part of it: format, lint, types
# Each makes the environment it needs in $(VENV), once; it is made again when a pin or the package's metadata changes.
# Where pip finds PyTorch builds is pip's own setting (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
SOURCES := pyproject.toml $(wildcard setup.py) $(shell find trainprobe -name '*.c' -o -name '*.cpp' -o -name '*.h')

.PHONY: demo test check bench clean
.SILENT:

demo: $(VENV)/.core
	$(BIN)/trainprobe demo

# the tests run even where a check failed, so that one run tells everything and ends with pytest's own summary
test: $(VENV)/.dev
	status=0; $(MAKE) --no-print-directory check || status=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope tests || status=1; \
	exit $$status

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.core
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.overhead && $(BIN)/python -m benchmarks.memory

$(VENV)/.core: requirements/torch.txt requirements/core.txt $(SOURCES)
	echo "setting up $(VENV) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/torch.txt
	$(PIP) -r requirements/core.txt
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core requirements/dev.txt requirements/frameworks.txt
	$(PIP) -r requirements/torch.txt -r requirements/core.txt -r requirements/dev.txt
	$(PIP) --no-build-isolation -r requirements/torch.txt -r requirements/core.txt -r requirements/frameworks.txt
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
