# The two commands: `make` builds, installs and shows; `make test` tests.
# Everything else is one of the steps of these, and calls the tools below.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
TOOL := $(PY) -m cpu_wheel

ifdef RELEASE
export CPU_WHEEL_RELEASE := $(RELEASE)
endif

.PHONY: all table install wheel source series packager-series packaging package-check verify worktree refresh stock test test-all test-groups test-omni lint bench-build bench-budget bench-memory matrix upstream-tests pr clean distclean help

all: table

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# The output of `make series` is for scripts, so this says nothing there.
$(VENV)/tools: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import cpu_wheel'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing the build tools into $(VENV) ..." >&2
	@$(PIP) 'pip==26.3' && $(PIP) -c constraints.txt --group build --group test --group lint || \
	  { echo "make: pip could not install the build tools, see above; check the network and 'pip config list'" >&2; exit 1; }
	@touch $@

$(VENV)/ready: $(VENV)/tools
	@$(TOOL) torch
	@touch $@

table: install stock ## what the engine allocates, stock beside fork
	$(PY) -m benchmarks.allocation

install: $(VENV)/ready ## build the wheel and install it into .venv
	@$(TOOL) install

wheel: $(VENV)/ready ## build the wheel into dist/
	@$(TOOL) wheel

verify: $(VENV)/tools ## check where each file of WHEEL=FILE comes from
	@$(TOOL) verify "$${WHEEL:?WHEEL=FILE names the wheel}"

source: $(VENV)/tools ## make the patched source tree (RELEASE=X: of another release)
	@$(TOOL) source

series: $(VENV)/tools ## print the patch files of a release (RELEASE=X), in order
	@$(TOOL) series

packager-series: $(VENV)/tools ## write the series, the overlay as its last patch, to OUT=DIR
	@$(TOOL) packager-series "$${OUT:?OUT=DIR names the new folder}"

packaging: install ## write the patch lists, hashes and requirements that packaging/ repeats
	@$(PY) -m checks.recipes

package-check: install ## run distributions' tools on packaging/ and say where each ends
	@$(PY) -m checks.package

worktree: $(VENV)/tools ## make a git repository to edit, one commit a patch
	@$(TOOL) worktree

refresh: $(VENV)/tools ## write that repository's commits back to patches/
	@$(TOOL) refresh

stock: $(VENV)/ready ## unpack the native wheel as published, for comparison
	@$(TOOL) stock

lint: $(VENV)/ready ## ruff and mypy on our own code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: install stock lint ## all tests but those that take minutes
	$(PY) -m pytest -m 'not slow_test and not omni_test'

test-all: install stock lint ## all tests but those with vllm-omni
	$(PY) -m pytest -m 'not omni_test'

test-groups: install ## tests in real control groups: as root, with the memory controller (version 1)
	$(PY) -m pytest -m cgroup_test

# A folder of its own: in an environment vllm-omni's plugin would change every engine.
build/omni/ready: tests/fork/omni/requirements.txt $(VENV)/tools
	@rm -rf build/omni
	@$(PIP) --no-deps --require-hashes --no-build-isolation --target build/omni -r $<
	@touch $@

test-omni: install stock build/omni/ready ## tests with vllm-omni, which this installs
	$(PY) -m pytest -m omni_test tests/fork/omni

matrix: install ## build every release and run the KV cache tests on each
	$(PY) -m checks.matrix

upstream-tests: install ## compare upstream's own tests on stock and patched
	@$(PY) -m pip install --quiet -c constraints.txt --group upstream-tests
	$(PY) -m checks.upstream_tests

pr: install stock ## write the pull request to build/pr/ and run upstream's hooks
	@$(PY) -m pip install --quiet -c constraints.txt --group upstream-tests --group pull-request
	$(PY) -m checks.pr

bench-build: $(VENV)/ready ## how long the wheel takes, beside compressing its files
	$(PY) -m benchmarks.build_time

bench-budget: install ## what vllm kv-budget takes, and what is used of its plans
	$(PY) -m benchmarks.kv_budget
	$(PY) -m benchmarks.kv_budget_peaks

bench-memory: install ## memory, start-up and speed with the KV cache committed on use
	@$(PIP) -c constraints.txt --group plot
	$(PY) -m benchmarks.memory --plot

clean: ## remove what was built, keep downloads, worktrees and the environment
	rm -rf dist $(filter-out build/downloads build/worktree-%,$(wildcard build/*))

distclean: ## remove downloads and the environment too
	rm -rf dist build $(VENV)
