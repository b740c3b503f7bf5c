# Commands for a fresh machine that has Python 3.11 and pip, and nothing else:
#   make demo    train a small GPT with the probe on and show what it saw
#   make test    everything that must hold: format, lint, types, tests
#   make test-all   that, and every case of each matrix (tests/matrices.py)
#   make check   the quick part of it: format, lint, types
#   make quick   in three minutes, a test of each contract and room (tests/quick.txt)
#   make test-oldest   for the oldest releases that the package accepts.
# Each makes the environment it needs in $(VENV), once; it is made again when a pin or the package's metadata changes.
# Where pip finds PyTorch builds is pip's own setting (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
VENVS ?= .venvs
WORKERS ?= 2
BIN := $(VENV)/bin
# what is never imported need not be compiled to bytecode, which is a third of an installation's time
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
PIP := $(BIN)/python $(INSTALL)
CODE_IN_C := $(shell find trainprobe -name '*.c' -o -name '*.h')
SOURCES := pyproject.toml $(wildcard setup.py) $(CODE_IN_C)

.PHONY: demo test test-all quick test-mindspore test-triton test-foreign test-foreign-all test-foreign-axolotl test-oldest test-queries test-wheels wheels release-check gpu-bundle docs sanitize check bench clean
.SILENT:
# each process would compile again all that it imports: of torch alone that takes longer than the rest of its import
unexport PYTHONDONTWRITEBYTECODE

demo: $(VENV)/.core
	$(BIN)/trainprobe demo

# the environments are made while format, lint and types are checked; the tests run even where a check failed, so that one run
# tells everything and ends with the summary of pytest, and with what the table in docs/frameworks.md says without a test of this
# run that proved it
test: $(VENV)/.dev
	rm -rf .proofs; status=0; $(MAKE) --no-print-directory check & check=$$!; \
	$(MAKE) --no-print-directory $(MSPROBES) || test "$$CI" != true || status=1; \
	$(MAKE) --no-print-directory --keep-going $(OTHERS) || echo "what needs these is left out below, with the reason"; \
	wait $$check || status=1; \
	if test -e $(VENVS)/docs/.ready || test "$$CI" = true; then docs=docs; \
	else docs=; echo "make docs NOT RUN: $(VENVS)/docs could not be made (the reason stands above)"; fi; \
	$(MAKE) --no-print-directory --keep-going --output-sync -j $(WORKERS) test-wheels sanitize test-queries $$docs || status=1; \
	$(MAKE) --no-print-directory test-mindspore || status=1; \
	$(MAKE) --no-print-directory test-triton || status=1; \
	$(MAKE) --no-print-directory test-foreign || status=1; \
	$(MAKE) --no-print-directory $(VENVS)/megatron-lm/.ready || test "$$CI" != true || status=1; \
	TRAINPROBE_MSPROBE_PYTHON="$$(ls -d $(abspath $(VENVS)/msprobe)/bin/python)" \
	TRAINPROBE_MEGATRON_LM="$$(ls -d $(abspath $(VENVS)/megatron-lm)/site)" OMP_NUM_THREADS=1 \
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0 tests || status=1; \
	$(BIN)/python -m tests.support_table --check || status=1; \
	exit $$status

test-all: export TRAINPROBE_EXHAUSTIVE := 1
test-all: test

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist load -m "not slow" $$(cat tests/quick.txt)

# Twelve more environments. `msprobe` holds mindstudio-probe, with which tests/interop exchange files, and takes PyTorch from $(VENV);
# `msprobe-1.3` and `msprobe-8.1` (150 MB each) hold the releases before, which need numpy < 2, and carry their documentation.
# MindSpore needs numpy < 2 and brings 3.4 GB; it is without PyTorch. `triton` adds Triton (0.7 GB), which PyTorch brings along where it
# is built for CUDA, to $(VENV), and runs the kernels under Triton's interpreter. `oldest` holds the oldest releases that pyproject.toml
# accepts, PyTorch 2.4.0 first of all, and runs what a user of them stands on; it fetches 2.5 GB and is for whoever changes what depends
# on the version, so `make test` leaves it out. `foreign` (250 MB) and `foreign-all` (1.3 GB) add to $(VENV) packages whose training
# programs are run as they are (docs/foreign_programs.md); `make test` runs the first. `foreign-axolotl` (1.7 GB) is Axolotl, which
# needs another release of TRL. `wheels` (350 MB, most of it Zig) builds the
# wheels for Linux x86-64 and aarch64 and tries the first in an environment without a compiler. `queries` (0.9 GB, most of it Spark)
# adds pandas, Polars and Spark to $(VENV) and runs what docs/run_log.md shows of them. `docs` (60 MB) holds Sphinx, which builds the
# site. `megatron-lm` (16 MB) holds Megatron-LM, which writes checkpoints for tests/ckpt_compare. Where one cannot be made, its tests are left out with the reason, except in CI
# (CI=true), where they must run.
MSPROBES := $(VENVS)/msprobe/.ready $(VENVS)/msprobe-1.3/.ready $(VENVS)/msprobe-8.1/.ready
OTHERS := $(patsubst %,$(VENVS)/%/.ready,mindspore triton foreign wheels queries docs megatron-lm)
IN_mindspore := -n $(WORKERS) --dist loadscope --pynative waits tests/mindspore
AND_mindspore := -n $(WORKERS) --dist load --pynative free tests/mindspore
IN_triton := -n $(WORKERS) --dist load -k triton tests/triton_kernels tests/engine/arrays
IN_foreign := -n $(WORKERS) --dist load tests/foreign
IN_foreign-all := $(IN_foreign)
IN_foreign-axolotl := tests/foreign/test_foreign.py
IN_wheels := -p no:xdist tests/wheels
IN_queries := -p no:xdist tests/queries
IN_oldest := -n $(WORKERS) --dist loadscope tests/engine tests/test_observer_effect.py tests/test_gradients.py \
	tests/test_debugger.py tests/integrations/torch_loop/test_torch_loop.py \
	--deselect tests/integrations/torch_loop/test_torch_loop.py::test_a_loop_of_accelerate_steps_where_its_accumulation_ends \
	--deselect tests/integrations/torch_loop/test_torch_loop.py::test_a_script_of_a_framework_gets_its_callback_and_no_second_watcher \
	tests/monitor/test_live_monitor.py tests/monitor/test_one_transfer.py tests/monitor/test_collectives.py \
	tests/monitor/audit/test_update_rule.py tests/monitor/audit/test_gradient_use.py \
	'tests/distributed/test_sharded.py::test_every_rank_trains_to_the_same_bits_with_and_without_the_probe[ddp-2-mix]'

# the support table tells of the newest
test-oldest: export TRAINPROBE_PROOFS := .proofs/oldest
test-triton: export TRITON_INTERPRET := 1
test-foreign: export TRAINPROBE_FOREIGN := quick
test-foreign-all: export TRAINPROBE_FOREIGN := all
test-foreign-axolotl: export TRAINPROBE_FOREIGN := axolotl
test-triton test-foreign test-foreign-all test-foreign-axolotl test-queries test-wheels: | $(VENV)/.dev
$(VENVS)/foreign-all/.ready: requirements/foreign.txt
test-mindspore test-triton test-foreign test-foreign-all test-foreign-axolotl test-oldest test-queries test-wheels: test-%: | $(VENV)/.core
	if $(MAKE) --no-print-directory $(VENVS)/$*/.ready; then \
	export OMP_NUM_THREADS=1 PATH="$(abspath $(VENVS)/$*)/bin:$$PATH"; status=0; \
	$(VENVS)/$*/bin/python -m pytest -q $(IN_$*) || status=1; \
	test -z "$(AND_$*)" || $(VENVS)/$*/bin/python -m pytest -q $(AND_$*) || status=1; exit $$status; \
	else echo "make test-$* NOT RUN: $(VENVS)/$* could not be made (the reason stands above)"; test "$$CI" != true; fi

wheels: | $(VENVS)/wheels/.ready
	$(VENVS)/wheels/bin/python build_wheels.py dist

# what is published is built, checked, installed in an empty environment and used as the README says
release-check: | $(VENVS)/wheels/.ready
	rm -rf dist/release
	$(VENVS)/wheels/bin/python build_wheels.py dist/release
	$(VENVS)/wheels/bin/python -m twine check --strict dist/release/*
	TRAINPROBE_RELEASE=$(abspath dist/release) $(VENVS)/wheels/bin/python -m pytest -q -p no:xdist tests/wheels

# the site of docs/ with search and a reference from docstrings, in build/site; a warning is an error
docs: $(VENV)/.dev | $(VENVS)/docs/.ready
	$(VENVS)/docs/bin/python -m sphinx -nW --keep-going -q -b html docs build/site

# what a GPU machine without a registry needs: copy the tree with dist/gpu there and run `bash benchmarks/gpu/run.sh`
gpu-bundle: | $(VENVS)/wheels/.ready
	PYTHONPATH=. $(VENVS)/wheels/bin/python -m benchmarks.gpu.bundle dist/gpu

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CODE_IN_C)
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# the compiled part, built to check each access to memory (AddressSanitizer) and each operation (UndefinedBehaviorSanitizer)
SANITIZED := build/sanitized
IN_SANITIZED := tests/engine/test_tape.py tests/engine/core/test_stacks.py tests/engine/arrays/test_geometry.py \
	tests/engine/arrays/test_views.py tests/engine/storage/test_step_journal.py \
	tests/op_check/test_compiled_measure.py tests/test_gradients.py
sanitize: $(VENV)/.dev
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r trainprobe tests benchmarks setup.py pyproject.toml README.md LICENSE $(SANITIZED)
	cd $(SANITIZED) && CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g" \
	LDFLAGS="-fsanitize=address,undefined" $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && OMP_NUM_THREADS=1 PYTHONPATH=. PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	$(abspath $(BIN))/python -m pytest -q -p no:xdist --capture=sys -m "not slow" $(IN_SANITIZED)

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

# one process at a time makes it; whoever waited finds it done. MindSpore's wheels are for Python 3.11 on Linux.
$(VENVS)/%/.ready: requirements/%.txt | $(VENV)/.core
	mkdir -p $(VENVS)
	flock $(VENVS)/.lock sh -ec ' \
	test ! $@ -nt $< || exit 0; \
	echo "setting up $(VENVS)/$* (gigabytes, some minutes the first time)"; \
	test -x $(VENVS)/$*/bin/python || $(PYTHON) -m venv $(VENVS)/$*; \
	$(VENVS)/$*/bin/python $(INSTALL) --no-cache-dir --no-deps -r $<; \
	{ pwd; case $* in triton | msprobe* | foreign* | queries | wheels | docs) \
		$(BIN)/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))" ;; esac; } \
		> "$$($(VENVS)/$*/bin/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))")/trainprobe_tree.pth"; \
	touch $@'

# no environment but a folder that goes in front of PYTHONPATH; pip would refuse the wheel for this Python
$(VENVS)/megatron-lm/.ready: requirements/megatron-lm.txt | $(VENV)/.core
	mkdir -p $(VENVS)
	rm -rf $(VENVS)/megatron-lm/site
	$(PIP) --no-deps --ignore-requires-python --python-version 3.12 --only-binary=:all: --target $(VENVS)/megatron-lm/site -r $<
	touch $@

clean:
	rm -rf build dist *.egg-info .proofs .pytest_cache .ruff_cache .hypothesis
