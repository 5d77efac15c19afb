# Everything a newcomer needs, one word each; `make help` lists them. Nothing is installed outside .venv.
#   PYTHON=python3.12   which Python makes the .venv         ARGS="..."   options for train, test, test-gpu, bench, sanitize, tsan, faults, coverage, sanitize-gpu

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --no-warn-script-location
STAMP  := $(VENV)/.done

# Packages are installed without byte code, which costs more than it saves here; what is imported is cached by the first import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help environment build extension peers train test test-gpu bench sanitize tsan fuzz oom torture soak faults coverage sanitize-gpu docs wheels advisories lint format clean distclean
.DELETE_ON_ERROR:
# Also below `make -j`: no two pips write to one environment. What takes long is parallel inside: compilers, and tests.
.NOTPARALLEL:

help:
	@echo "make train      train a small language model on this machine (ARGS='--steps 50 ...')"
	@echo "make test       unit and PyTorch parity tests (ARGS='-k rope ...')"
	@echo "make build      build the extension in place; only what changed is compiled again"
	@echo "make bench      measure against PyTorch          make lint       check format, Python, types and warnings"
	@echo "make sanitize   tests under ASan and UBSan       make format     rewrite to the house format"
	@echo "make tsan       race scripts under ThreadSanitizer"
	@echo "make fuzz       random programs, doors and files (ARGS='--seconds 600 --jobs 16 --seed 1')"
	@echo "make torture    kills, failing system calls and failing power (ARGS='power --states 20000')"
	@echo "make soak       train, evaluate, sample, save and resume for two hours (ARGS='--minutes 10 --device cuda')"
	@echo "make faults     plant wrong edits, and see the tests catch them (ARGS='--jobs 16 --only rope ...')"
	@echo "make coverage   lines and branches of csrc that the unit tests run (ARGS='-n 12 ...' for pytest)"
	@echo "make oom        memory that ends at every allocation of a step (ARGS='--device cuda')"
	@echo "make advisories  known advisories of the dependencies, where PyPI can be reached"
	@echo "make docs       build the documentation site in build/site"
	@echo "make wheels     source distribution and wheels in dist/ (ARGS='--variant cpu cuda --python python3.11 python3.12')"
	@echo "make test-gpu   all tests, on the GPU            make clean      remove what was built (distclean: .venv too)"
	@echo "make sanitize-gpu  every kernel under NVIDIA's compute-sanitizer (ARGS='--tools memcheck --cases 4 --jobs 4 ...')"

# ---- the environment: each stamp names what has been installed, and is renewed when the file that lists it changes ----------

$(STAMP)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "xtrain needs Python 3.10 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMP) && touch $@

# What pyproject.toml's [build-system] asks for, so that every later build runs without pip's build isolation.
$(STAMP)/build: pyproject.toml $(STAMP)/venv
	@echo "installing what the build needs"
	@sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr , ' ' | xargs $(PIP)
	@touch $@

environment: $(STAMP)/build

# The extension comes first, so that a compiler's complaint is not buried in pip's; pip then finds its objects made.
extension: $(STAMP)/build
	@$(BIN)/python setup.py --quiet build_ext --inplace

$(STAMP)/install: pyproject.toml $(STAMP)/build | extension
	@echo "installing xtrain, editable"
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(STAMP)/plot: $(STAMP)/install
	@echo "installing what plots need"
	@$(PIP) --no-build-isolation --editable '.[plot]'
	@touch $@

# Also installs the package, as $(STAMP)/install does: once, where both are missing.
$(STAMP)/unit: pyproject.toml $(STAMP)/build | extension
	@echo "installing xtrain, editable, and what unit tests need"
	@$(PIP) --no-build-isolation --editable '.[plot,test]'
	@touch $(STAMP)/install $@

$(STAMP)/coverage: $(STAMP)/unit
	@$(PIP) $(shell sed -n 's/^coverage = \[\(.*\)\]/\1/p' pyproject.toml | tr ',' ' ')
	@touch $@

# The pages need the package where it lies and a core that loads, none for GPUs: what is built for CUDA stays, and nothing is compiled for it.
$(STAMP)/docs: pyproject.toml $(STAMP)/build
	@echo "installing what the documentation needs"
	@sed -n 's/^dependencies = \[\(.*\)\]/\1/p; s/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr , ' ' | xargs $(PIP)
	@touch $@

# Knows nothing of xtrain, so that it can be installed while the extension is compiled; with the packages of unit tests, which then
# need not be got when no compiler is at work any more.
$(STAMP)/peers: parity/requirements.txt pyproject.toml $(STAMP)/build
	@echo "installing PyTorch, and what else the tests compare with: it is large, this may take minutes"
	@sed -n 's/, "xtrain\[.*\]"//; s/^dependencies = \[\(.*\)\]/\1/p; s/^plot = \[\(.*\)\]/\1/p; s/^gguf = \[\(.*\)\]/\1/p; s/^test = \[\(.*\)\]/\1/p' \
	    pyproject.toml | tr , ' ' | xargs $(PIP) --requirement parity/requirements.txt
	@touch $@

$(STAMP)/test: $(STAMP)/unit $(STAMP)/peers
	@touch $@

$(STAMP)/lint: $(STAMP)/build
	@$(PIP) $(shell sed -n 's/^lint = \[\(.*\)\]/\1/p' pyproject.toml | tr ',"' '  ')
	@touch $@

# ---- the loop ------------------------------------------------------------------------------------------------------------

build: extension $(STAMP)/install

peers: $(STAMP)/peers

train: $(STAMP)/plot build
	@$(BIN)/xtrain train $(ARGS)

# A process for each core; with --pdb, or -n 0 in ARGS, it is one.
WORKERS := -n logical --maxprocesses 8 --dist worksteal
test: $(STAMP)/test build
	@$(BIN)/python -m pytest $(WORKERS) $(ARGS)

docs: $(STAMP)/docs
	@{ ls xtrain/_lib/*cuda* && $(BIN)/python -c 'import xtrain'; } >/dev/null 2>&1 \
	    || XTRAIN_CUDA=0 $(BIN)/python setup.py --quiet build_ext --inplace
	@$(BIN)/sphinx-build --quiet --fail-on-warning -c docs/site docs build/site
	@$(BIN)/python docs/site/check_links.py build/site && echo "build/site/index.html"

# tools/wheels.py has the options, and makes an environment of its own for each Python.
wheels:
	@$(PYTHON) tools/wheels.py $(ARGS)

# At the versions that are installed here; after `make test` and `make lint`, all extras are.
advisories: $(STAMP)/install
	@$(BIN)/python tools/advisories.py $(ARGS)

test-gpu:
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    XTRAIN_CUDA=1 XTRAIN_TEST_DEVICE=cuda $(MAKE) --no-print-directory test WORKERS= ARGS="$(ARGS)"; \
	else echo "test-gpu: no NVIDIA GPU on this machine, nothing was run"; fi

bench: $(STAMP)/test build
	@$(BIN)/python parity/bench/train_step.py $(ARGS)

# A second copy of the package, built with ASan and UBSan, takes the place of the editable one. The sanitizer's run-time library has
# to be in the process before Python, and Python's own allocator out of the way, so that every buffer is seen. A report ends the
# process; --capture=sys lets it through to the terminal.
SANITIZED := build/sanitize/lib
SANITIZE_CC := $(if $(filter default undefined,$(origin CC)),gcc,$(CC))
sanitize: $(STAMP)/unit
	@rm -rf $(SANITIZED)
	@CC="$(SANITIZE_CC)" XTRAIN_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	@LD_PRELOAD="$$($(SANITIZE_CC) -print-file-name=libasan.so) $$($(SANITIZE_CC) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	    PYTHONMALLOC=malloc PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(SANITIZED) XTRAIN_SANITIZE=1 \
	    $(BIN)/pytest tests --capture=sys -p no:cacheprovider $(ARGS)

# The scripts of tests/races with a copy of the extension built with ThreadSanitizer (ARGS='--seconds 50 pool ...').
TSAN := build/tsan/lib
tsan: $(STAMP)/unit
	@rm -rf $(TSAN)
	@CC="$(SANITIZE_CC)" XTRAIN_SANITIZE=thread $(BIN)/python setup.py --quiet build --build-base build/tsan --build-lib $(TSAN)
	@CC="$(SANITIZE_CC)" $(BIN)/python tests/support/tsan.py --package $(TSAN) $(ARGS)

$(STAMP)/fuzz: $(STAMP)/unit
	@echo "installing what reads the fuzzed files: tokenizers, Parquet, chat templates"
	@$(PIP) --no-build-isolation --editable '.[hf,data,chat]'
	@touch $@

# tests/fuzz/run.py has the options; a table at the end, and for each finding the command that shows it again.
fuzz: $(STAMP)/fuzz build
	@$(BIN)/python tests/fuzz/run.py $(ARGS)

# tests/support/plant_faults.py has the options; it builds copies of the tree, and leaves this one alone.
faults: $(STAMP)/unit build
	@$(BIN)/python tests/support/plant_faults.py $(ARGS)

# The unit suite with gcov's counters, in a copy of the extension that is built with them; then the table of rooms. A test that fails
# leaves the table, and fails the target.
COVERAGE := build/coverage/lib
coverage: $(STAMP)/coverage
	@rm -rf $(COVERAGE) && find build/obj/sanitize-coverage -name '*.gcda' -delete 2>/dev/null || true
	@CC="$(SANITIZE_CC)" XTRAIN_SANITIZE=coverage $(BIN)/python setup.py --quiet build --build-base build/coverage --build-lib $(COVERAGE)
	@PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COVERAGE) $(BIN)/pytest tests -q -p no:cacheprovider $(ARGS); status=$$?; \
	    $(BIN)/python tests/support/coverage_rooms.py --gcovr $(BIN)/gcovr && exit $$status

# Every block of memory, then, on the CPU, every malloc of the C core.
oom: $(STAMP)/unit build
	@$(BIN)/python tests/torture/oom.py $(ARGS)
	@case "$(ARGS)" in *device*) ;; *) $(BIN)/python tests/torture/oom.py --malloc $(ARGS) ;; esac

# tests/torture/torture.py and soak.py have the options.
torture: $(STAMP)/unit build
	@$(BIN)/python tests/torture/torture.py $(ARGS)

soak: $(STAMP)/unit build
	@$(BIN)/python tests/torture/soak.py $(ARGS)

# parity/support/sanitize_gpu.py has the options, and its --logs what the processes said.
sanitize-gpu:
	@if nvidia-smi -L >/dev/null 2>&1; then \
	    XTRAIN_CUDA=1 $(MAKE) --no-print-directory build && $(BIN)/python parity/support/sanitize_gpu.py $(ARGS); \
	else echo "sanitize-gpu: no NVIDIA GPU on this machine, nothing was run"; fi

# ---- form ----------------------------------------------------------------------------------------------------------------

C_FILES = $(shell find csrc cuda tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

lint: $(STAMP)/lint
	@$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format would change Python files: run make format" >&2; exit 1; }
	@$(BIN)/basedpyright --pythonpath $(BIN)/python
	@$(BIN)/python setup.py --quiet build_ext --check
	@echo "lint: no objections"

format: $(STAMP)/lint
	@$(BIN)/clang-format -i $(C_FILES)
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf build dist *.egg-info xtrain/_lib xtrain/_C.*.so .pytest_cache .ruff_cache
	find csrc cuda xtrain tests parity -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV)
