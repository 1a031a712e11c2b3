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

.PHONY: all packaging-tools table install wheel source series packager-series packaging verify worktree refresh stock test test-all test-packaging test-groups soak test-omni lint bench-budget bench-memory matrix upstream-tests pr clean distclean help

all: table

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# The output of `make series` is for scripts, so this says nothing there.
$(VENV)/tools: pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || \
	  { echo "make: missing: $(PYTHON) (Python 3.11 or newer); see the README's first lines" >&2; exit 1; }
	@$(PYTHON) cpu_wheel/host.py
	@$(PYTHON) -m venv $(VENV)
	@echo "installing the build tools into $(VENV) ..." >&2
	@$(PIP) 'pip==26.3' && $(PIP) -c constraints.txt --group build --group deploy --group test --group lint || \
	  { echo "make: pip could not install the build tools, see above; check the network and 'pip config list'" >&2; exit 1; }
	@touch $@

$(VENV)/ready: $(VENV)/tools
	@$(TOOL) torch
	@touch $@

table: install ## what the engine allocates, stock beside fork
	$(PY) -m benchmarks.allocation

install: $(VENV)/ready $(VENV)/deploy ## build the wheel and install it into .venv
	@$(TOOL) install

wheel: $(VENV)/ready ## build the wheel into dist/, and that of kv-budget --deploy
	@$(TOOL) wheel
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./deploy

# The extra kv-budget of the wheel names this package.
$(VENV)/deploy: $(VENV)/ready deploy/pyproject.toml $(wildcard deploy/*/*.py)
	@$(PIP) --no-build-isolation -c constraints.txt ./deploy
	@touch $@

# Commands of python -m cpu_wheel, with their argument and RELEASE=X, if any.
source series packager-series verify refresh: $(VENV)/tools
	@$(TOOL) $@ $${OUT:+"$$OUT"} $${WHEEL:+"$$WHEEL"}

source: ## make the patched source tree
series: ## print the patch files of a release, in order
packager-series: ## write the series, the overlay as its last patch, to OUT=DIR
verify: ## check where each file of WHEEL=FILE comes from
refresh: ## write the commits of the worktree back to patches/

packaging-tools:
	@$(PYTHON) cpu_wheel/host.py packaging

packaging: install ## write the patch lists, hashes and requirements that packaging/ repeats
	@$(TOOL) recipes

# The last line is for upstream's tests/conftest.py, as in upstream-tests.
worktree: $(VENV)/ready ## make a git repository to edit and test, one commit a patch
	@$(TOOL) worktree
	@$(PIP) -c constraints.txt --group upstream-tests

stock: $(VENV)/ready ## unpack the native wheel as published, for comparison
	@$(TOOL) stock

lint: $(VENV)/ready ## ruff and mypy on our own code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Two files at once, and so one thread an engine: most of a test is importing vLLM.
PYTEST := VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
  $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Of another release only the engine's tests: those of the fork itself are of the pinned.
test: install $(if $(RELEASE),,stock lint) ## the tests of every change, or of RELEASE=X
	$(PYTEST) -m 'not slow_test and not packaging_test and not cgroup_test and not omni_test' \
	  $(if $(RELEASE),tests/platforms tests/v1 tests/entrypoints tests/utils_)

test-all: install stock lint test-packaging ## all tests but those with vllm-omni
	$(PYTEST) -m 'not packaging_test and not cgroup_test and not omni_test'

test-packaging: packaging-tools install stock ## tests with a distribution's tools
	$(PYTEST) -m packaging_test tests/fork

# One engine at a time: what several take together is what these tests are about.
test-groups: install ## tests in real control groups, as root
	@$(PY) -m tests.v1.core.control_groups
	$(PY) -m pytest -m 'cgroup_test and not slow_test' tests/v1

soak: install stock ## those that take minutes: random sizes, and what fails on stock
	@$(PY) -m tests.v1.core.control_groups
	$(PY) -m pytest -m 'cgroup_test and slow_test' tests/v1 tests/fork/test_stock.py

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
	@$(PIP) -c constraints.txt --group upstream-tests
	$(PY) -m checks.upstream_tests

pr: install stock ## write the pull request NAME=X to build/pr/ and run upstream's hooks
	@$(PIP) -c constraints.txt --group upstream-tests --group pull-request
	$(PY) -m pull_request.make "$(NAME)" $(if $(UPSTREAM),--upstream "$(UPSTREAM)")

bench-budget: install ## what vllm kv-budget takes, and what is used of its plans
	$(PY) -m benchmarks.kv_budget
	$(PY) -m benchmarks.kv_budget_peaks

bench-memory: install ## memory, start-up and speed with the KV cache committed on use
	$(PY) -m benchmarks.memory

clean: ## remove what was built, keep downloads, worktrees and the environment
	rm -rf dist $(filter-out build/downloads build/worktree-%,$(wildcard build/*))

distclean: ## remove downloads and the environment too
	rm -rf dist build $(VENV)
