# Headway's commands; `make` alone lists them. Everything is installed into .venv, nothing outside this folder.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Give me three tips for a good night's sleep.
ARGS ?=

# Passed by the environment and unexpanded, so that quotes and dollars in a prompt mean nothing to make or the shell.
run: export HEADWAY_PROMPT := $(value PROMPT)

# Threads that wait for work sleep: when the machine has other things to do, spinning makes every one of them slower.
test test-all: export OMP_WAIT_POLICY ?= PASSIVE

# Bytecode is kept, whatever a container's image says: else every worker and every program that a test starts compiles
# torch, transformers and the tests again.
test test-all: export PYTHONDONTWRITEBYTECODE :=

# A stamp's name holds what an installation depends on: another version, pin, folder, compiler or native source is
# another stamp.
NATIVE := src/headway/kernels/native
INSTALLED_FROM := pyproject.toml constraints.txt hatch_build.py $(sort $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h))
BUILT_WITH := $(foreach name,CXX CXXFLAGS LDFLAGS HEADWAY_NATIVE_BUILD,$(if \
	$(filter-out default undefined,$(origin $(name))),$(name)=$(subst ','\'',$($(name)))))
KEY := $(shell { pwd; echo '$(BUILT_WITH)'; command -v c++ g++ clang++ || true; cat $(INSTALLED_FROM); } | \
	{ sha256sum 2>/dev/null || shasum -a 256; } | cut -c1-16)
RUN_STAMP := $(VENV)/.headway-run-$(KEY)
TEST_STAMP := $(VENV)/.headway-test-$(KEY)
DOCS_STAMP := $(VENV)/.headway-docs-$(KEY)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# What the tests compare GGUF files with, in an environment of its own.
LLAMA_CPP := llama-cpp-python==0.3.36
LLAMA := $(VENV)/llama
LLAMA_PYTHON := $(or $(HEADWAY_TEST_LLAMA_PYTHON),$(if $(filter 1,$(HEADWAY_NO_LLAMA)),,$(abspath $(LLAMA))/bin/python))

.PHONY: help run wheel test test-all browser programs llama native-sanitize gpu-sanitize lint format docs clean clean-all

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUN_STAMP) ## answer a prompt with the default model (PROMPT="…", ARGS="--max-tokens 64")
	@$(PY) -m headway.cli.main run $(ARGS) -- "$$HEADWAY_PROMPT" </dev/null

test: $(TEST_STAMP) browser ## run the tests (ARGS="tests/kv -x" narrows them)
	@$(PY) -m headway.cli.main models pull >/dev/null || echo "Tests that need the default model will fail."
	@$(build_guest) || echo "Tests of uploaded programs will fail."
	@$(PY) -m pytest $(or $(ARGS),-n 3 --dist loadfile --no-loadscope-reorder) || { code=$$?; $(if $(strip $(ARGS)),,$(run_alone);) exit $$code; }

# All of it where nothing may fall back to torch unnoticed, then the program API once more on the torch reference.
test-all: $(TEST_STAMP) browser programs llama ## run the slow tests too, and write build/test-all.log
	@mkdir -p build
	@HEADWAY_NATIVE_BUILD=all $(PIP) install --quiet --no-deps --no-build-isolation --no-compile -e .  # every instruction set
	@{ failed=0; $(PY) tests/native/check.py || failed=1; $(PY) tests/native/arm.py || failed=1; \
	HEADWAY_TEST_LLAMA_PYTHON='$(LLAMA_PYTHON)' HEADWAY_NATIVE=$${HEADWAY_NATIVE:-require} $(PY) -m pytest -m "not gpu" --hypothesis-profile=all --color=no --junitxml=build/test-all.xml $(ARGS) || failed=1; \
	$(if $(strip $(ARGS)),,HEADWAY_NATIVE=off $(PY) -m pytest -m "not gpu" --hypothesis-profile=all --color=no tests/program tests/oracle || failed=1;) \
	exit $$failed; } 2>&1 | tee build/test-all.log

# Best effort: what is missing afterwards is said by the tests that need it.
browser: $(TEST_STAMP) ## install chromium, node and axe-core for the tests of the Lab and the JavaScript client, where apt is
	@$(if $(filter 1,$(HEADWAY_NO_BROWSER)),true,$(get_chromium))
	@$(if $(filter 1,$(HEADWAY_NO_BROWSER)),true,$(get_node))
	@$(if $(filter 1,$(HEADWAY_NO_BROWSER)),true,$(get_axe))

wheel: $(RUN_STAMP) ## build a wheel with every instruction set into dist/, and try it where there is no compiler
	@rm -rf dist && HEADWAY_NATIVE_BUILD=all $(PIP) wheel --no-deps --wheel-dir dist .
	@$(PY) tests/native/wheel.py dist/*.whl

programs: $(TEST_STAMP) ## build the sandbox's guest for uploaded programs, and a wheel of it, in build/programs
	@$(build_guest)

# Best effort, too: without it those tests fail.
llama: $(TEST_STAMP) ## build llama.cpp for the tests that compare with it; HEADWAY_NO_LLAMA=1 leaves them out
	@$(if $(filter 1,$(HEADWAY_NO_LLAMA)),true,$(get_llama))

native-sanitize: $(TEST_STAMP) ## run the native library under sanitizers and valgrind
	@$(PY) tests/native/check.py

gpu-sanitize: $(TEST_STAMP) ## run the Triton kernels under compute-sanitizer, on a CUDA device
	@$(PY) tests/gpu/sanitize.py

lint: $(TEST_STAMP) ## check style, types and the order of layers
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright
	@$(VENV)/bin/lint-imports

format: $(TEST_STAMP) ## format the code and mend what can be mended
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: $(DOCS_STAMP) ## build the documentation into site/
	@$(VENV)/bin/zensical build --clean

clean: ## remove caches and built files
	@rm -rf build dist site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f $(NATIVE)/_headway.so $(NATIVE)/_headway.dylib $(VENV)/.headway-*  # the next command installs again
	@find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove .venv too
	@rm -rf $(VENV)

# The packages of `make test` include those of `make run`.
$(RUN_STAMP):
	@$(call install,.,run)

# Debian's packages come meanwhile; `browser` says what is still missing then.
$(TEST_STAMP):
	@$(if $(filter 1,$(HEADWAY_NO_BROWSER)),,{ ($(get_chromium)); ($(get_node)); } >/dev/null 2>&1 & )$(call install,.[test],run test)

$(DOCS_STAMP):
	@$(call install,.[docs],run docs)

# $(call install,what,stamps): a virtual environment, the packages, and the stamps when all of it worked. The native
# library is compiled meanwhile: what needs no compiler is installed first, and what builds Headway with it, once for all.
define install
if $(PY) -m pip --version >/dev/null 2>&1; then $(PY) hatch_build.py & \
else $(check_python); $(PYTHON) hatch_build.py & $(new_venv); fi; \
$(PIP) install --no-compile -c constraints.txt -r <($(requirements)); \
$(PIP) install --no-compile --no-build-isolation -c constraints.txt -e '$(1)'; wait; \
ls $(NATIVE)/_headway.* >/dev/null 2>&1 || echo "No C++ compiler: Headway has no native library here and needs torch: $(PIP) install -c constraints.txt -e '.[torch]'"; \
for stamp in $(2); do rm -f $(VENV)/.headway-$$stamp-*; touch $(VENV)/.headway-$$stamp-$(KEY); done
endef

define requirements
$(PY) -c 'import tomllib; toml = tomllib.load(open("pyproject.toml", "rb")); print(*toml["build-system"]["requires"], *toml["project"]["dependencies"], sep="\n")'
endef

# Python for WebAssembly with Headway's client; kept while its sources are the same. bubblewrap confines processes.
define build_guest
$(if $(filter 1,$(HEADWAY_NO_BROWSER)),,command -v bwrap >/dev/null || { command -v apt-get >/dev/null && [[ $$(id -u) == 0 ]] && \
	apt-get install -y --no-install-recommends bubblewrap >/dev/null 2>&1; } || true;) \
$(PY) -m headway.sandbox.build build/programs
endef

# Three workers on two cores can starve each other. What fails among them runs once more by itself: a test that fails
# again has failed, and one that passes has been named above and wants mending.
define run_alone
[[ $$code != 1 ]] || { echo "What failed runs once more, one test at a time."; \
	$(PY) -m pytest --last-failed --last-failed-no-failures none && exit 0; }
endef

define get_chromium
for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
if command -v apt-get >/dev/null && [[ $$(id -u) == 0 ]]; then \
	echo "Installing chromium for the tests of the Lab."; \
	{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 || true; \
fi; \
command -v chromium >/dev/null || echo "No chromium, and it cannot be installed from here: the tests of the Lab fail without it. \
Install it (on Debian: sudo apt install chromium), or set HEADWAY_NO_BROWSER=1 to leave them out."
endef

define get_node
command -v node >/dev/null && command -v npm >/dev/null && exit 0; \
if command -v apt-get >/dev/null && [[ $$(id -u) == 0 ]]; then \
	echo "Installing node and npm for the tests of the JavaScript client."; \
	{ apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends nodejs npm; } >/dev/null 2>&1 || true; \
fi; \
command -v npm >/dev/null || echo "No node or npm, and they cannot be installed from here: the tests of the JavaScript client fail without \
them. Install them (on Debian: sudo apt install nodejs npm), or set HEADWAY_NO_BROWSER=1 to leave them out."
endef

# Without npm, or without a network, the page is still held against the rules in tests/server/lab/test_lab_looks.py.
define get_axe
[[ -f $(VENV)/axe.min.js ]] || ! command -v npm >/dev/null || { \
	folder=$$(mktemp -d) && (cd $$folder && timeout 60 npm pack axe-core@4 && tar xzf axe-core-*.tgz) >/dev/null 2>&1 \
	&& cp $$folder/package/axe.min.js $(VENV)/axe.min.js; rm -rf $$folder; true; }
endef

define get_llama
[[ -n '$(HEADWAY_TEST_LLAMA_PYTHON)' || -f $(VENV)/.headway-$(LLAMA_CPP) ]] || { \
	echo "Building llama.cpp for the tests that compare with it, which takes some minutes."; \
	$(PY) -m venv --without-pip $(LLAMA) && $(PIP) --python $(LLAMA)/bin/python install --quiet numpy $(LLAMA_CPP) && \
	touch $(VENV)/.headway-$(LLAMA_CPP); } || echo "$(LLAMA_CPP) cannot be installed here: the tests that compare with llama.cpp \
fail without it. Name a Python that has it in HEADWAY_TEST_LLAMA_PYTHON, or set HEADWAY_NO_LLAMA=1 to leave them out."
endef

define check_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Headway needs Python 3.11 or later; '$(PYTHON)' is not. Name another with PYTHON=python3.12." >&2; exit 2; }
endef

define new_venv
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	echo "'$(PYTHON)' cannot make a virtual environment. On Debian: sudo apt install python3-venv" >&2; exit 2; }; \
$(PYTHON) -m venv $(VENV)
endef
