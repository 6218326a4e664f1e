# `make demo` and `make test` need only Python >= 3.10, make and the network to PyPI.
# Variables: VENV (where the virtual environment goes), PYTHON (which interpreter makes it),
# DEMO (the demo's output folder), WORKERS (test processes, trainings at a time), TESTS (which tests to run, by default
# all), PYTEST_ARGS (more arguments for pytest), RESULTS (where `make reproduce` writes JSON files, plots, the overview and
# the page of results; by default each goes to its place in the repository), WORK (finished trainings and measurements,
# from which it resumes), NOTEBOOKS (those to execute), LOWEST (where the virtual environment with the lowest versions
# goes), NEXT and TRANSFORMERS (the same for a transformers that constraints.txt cannot take yet), NEWEST (the same for
# the newest versions), UPSTREAM (what replaces some of these), TORCH (another torch in them), TRITONS (which compile the kernels for `make test-kernels`), HUB_KERNEL and
# REPO_ID (the folder of the exported kernel, and the repository on the Hub that it is for).
VENV ?= .venv
LOWEST ?= .venv-lowest
NEXT ?= .venv-next
# Asks for a peft that is not published yet.
TRANSFORMERS ?= 5.24.0
NEWEST ?= .venv-newest
UPSTREAM ?=
TORCH ?=
TRITONS ?= 3.9.0 3.6.0 3.4.0
CONSTRAINTS ?= constraints.txt
DEMO ?= demo-output
RESULTS ?= benchmarks/results
WORK ?= runs/reproduce
HUB_KERNEL ?= mhla-kernel
REPO_ID ?=
WORKERS ?= 2
PYTEST_ARGS ?=
TESTS ?=
NOTEBOOKS ?=
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$python && break; done)

bin := $(VENV)/bin
install := $(bin)/python -m pip install --disable-pip-version-check --no-input -c $(CONSTRAINTS)
smoke_test := tests/test_smoke.py
# What depends on the versions of transformers and huggingface_hub.
version_tests := tests/integrations/transformers tests/conversion/test_transformers.py tests/conversion/test_wan.py \
	tests/hub/test_download.py tests/hub/test_push.py tests/test_import.py tests/test_pipelines.py tests/test_presets.py tests/utils/test_compat.py tests/utils/test_versions.py

.DEFAULT_GOAL := help
.PHONY: help demo reproduce reproduce-recovery size hub-kernel test test-all test-upstream test-lowest test-versions \
	test-newest test-these-versions test-kernels style quality docs notebooks clean

help:
	@echo "make demo       install into $(VENV) and run the demo into $(DEMO)"
	@echo "make reproduce  run the experiments of docs/results on the CPU, about 40 minutes on two cores, into RESULTS=$(RESULTS)"
	@echo "make reproduce-recovery  run the recoveries of docs/results, about 80 minutes more"
	@echo "make test       install into $(VENV) and run the fast tests"
	@echo "make test-all   run the slow tests too, with coverage; TESTS=tests/app runs those of one folder"
	@echo "make test-upstream  run test suites of transformers on MHLA beside the stock models"
	@echo "make test-kernels  compile the kernels for four generations of GPUs with Triton $(TRITONS), and judge the result"
	@echo "make test-lowest  a smoke test with the lowest supported versions of all dependencies, in $(LOWEST)"
	@echo "make test-versions  the tests of transformers models, with the lowest, the pinned and the next version of it"
	@echo "make test-newest  the same tests with the newest release of every dependency, or with UPSTREAM in their place"
	@echo "make size       count code lines, files and raise statements by folder, beside those of BEFORE=checkout"
	@echo "make hub-kernel  export the operator as a kernel for the Hub into $(HUB_KERNEL), for REPO_ID=owner/name"
	@echo "make style      format the code;  make quality  check format, lint and types"
	@echo "make docs       build the documentation into site/"
	@echo "make notebooks  execute the notebooks, or NOTEBOOKS=notebooks/1_quick_start.ipynb, and save their outputs"
	@echo "make clean      remove caches and build products"

$(bin)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python >= 3.10 found; install one, or say which: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: $(PYTHON) is older than Python 3.10, or is not there; say which: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV)/bin; \
		echo "error: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@# Newer releases install in half the time of those that come with Python; without one, the old one will do.
	@-$(bin)/python -m pip install --disable-pip-version-check --no-input --quiet --upgrade pip

# A stamp for each set of extras: installed again when what is to be installed changes.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(bin)/python
	$(install) -e ".[$*]"
	@touch $@

demo: $(VENV)/.installed-demo
	$(bin)/mhla-hf demo $(DEMO)

# The overview and the pages of results lie elsewhere in the repository, but beside the other files of own RESULTS.
in_place := $(filter benchmarks/results,$(patsubst %/,%,$(RESULTS)))
overview := $(if $(in_place),docs/images,$(RESULTS))/overview.png
results_pages := $(if $(in_place),docs/results,$(RESULTS)/pages)

reproduce: $(VENV)/.installed-dev
	$(bin)/python -m benchmarks.experiments run --device cpu --jobs $(WORKERS) --work $(WORK)/experiments --output $(RESULTS)
	$(bin)/python -m benchmarks.quality_dit --device cpu --jobs $(WORKERS) --work $(WORK)/quality_dit --output $(RESULTS)
	$(bin)/python -m benchmarks.overview --results $(RESULTS) --image $(overview)
	$(bin)/python -m benchmarks.experiments write --results $(RESULTS) --pages $(results_pages)

# BEFORE: another checkout, for a column beside this one's.
size:
	$(PYTHON) -m benchmarks.size $(BEFORE)

reproduce-recovery: $(VENV)/.installed-dev
	$(bin)/python -m benchmarks.recovery --jobs $(WORKERS) --work $(WORK)/recovery --json $(RESULTS)/recovery.json
	$(bin)/python -m benchmarks.captions $(WORK)/captions --results $(RESULTS)

hub-kernel: $(VENV)/.installed-hub-kernel
	$(bin)/python -m conversion.hub_kernel $(HUB_KERNEL) $(if $(REPO_ID),--repo-id $(REPO_ID))

# One thread for each worker: more would only get in each other's way. -rs: reasons of skipped tests.
pytest := OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 -rs

test: $(VENV)/.installed-test
	$(pytest) $(TESTS) $(PYTEST_ARGS)

# Takes half as long again as without coverage, and fails below 90 %. COVERAGE= leaves it out.
COVERAGE ?= --cov=mhla_hf --cov-report=term --cov-fail-under=90
test-all: $(VENV)/.installed-dev
	$(pytest) -m "not gpu" $(COVERAGE) $(TESTS) $(PYTEST_ARGS)

# Those of diffusers need a checkout: python tests/upstream/run.py diffusers --clone
test-upstream: $(VENV)/.installed-dev $(VENV)/.installed-upstream
	$(bin)/python tests/upstream/run.py transformers --workers $(WORKERS)

# constraints.txt with the packages of constraints-lowest.txt as they are there. torch is so where pip finds a CPU build of
# it, which needs PyTorch's index (PIP_EXTRA_INDEX_URL in .github/workflows): those of PyPI bring gigabytes of CUDA.
$(LOWEST)/constraints.txt: constraints.txt constraints-lowest.txt | $(bin)/python
	sed -n 's/^\([A-Za-z0-9_.-]*==\).*/^\1/p' constraints-lowest.txt | grep -i -v -f - constraints.txt > $@.new
	cat constraints-lowest.txt >> $@.new
	torch=$(TORCH); if [ -z "$$torch" ]; then torch=$$(sed -n 's/^torch==//p' constraints-lowest.txt); \
		$(bin)/python -m pip install --disable-pip-version-check --quiet --dry-run --ignore-installed --no-deps \
		"torch==$$torch+cpu" 2>/dev/null || torch=$$(sed -n 's/^torch==//p' constraints.txt); fi; \
		sed "s/^torch==.*/torch==$$torch/" $@.new > $@
	rm $@.new

print_versions := import sys; from importlib.metadata import version; \
	print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")

test-these-versions: $(VENV)/.installed-$(EXTRA)
	@$(bin)/python -c '$(print_versions)' $$(sed -n 's/==.*//p' constraints-lowest.txt)
	$(pytest) $(TESTS) $(PYTEST_ARGS)

$(NEXT)/constraints.txt: constraints.txt Makefile | $(bin)/python
	sed "s/^transformers==[0-9.]*/transformers==$(TRANSFORMERS)/" constraints.txt > $@

these_versions := $(MAKE) --no-print-directory test-these-versions
lowest := VENV=$(LOWEST) CONSTRAINTS=$(LOWEST)/constraints.txt EXTRA=smoke

test-lowest:
	$(these_versions) $(lowest) TESTS=$(smoke_test)

test-versions:
	$(these_versions) $(lowest) TESTS="$(smoke_test) $(version_tests)"
	$(these_versions) EXTRA=dev TESTS="$(smoke_test) $(version_tests)"
	$(these_versions) VENV=$(NEXT) CONSTRAINTS=$(NEXT)/constraints.txt EXTRA=smoke TESTS="$(smoke_test) $(version_tests)"

# No constraints, and installed again every time: releases come without a change here. torch alone is that of
# constraints.txt where no index of CPU builds is given, since the newest one on PyPI brings gigabytes of CUDA.
held_torch := $(if $(PIP_EXTRA_INDEX_URL),,$(shell grep '^torch==' constraints.txt))

test-newest:
	@$(MAKE) --no-print-directory VENV=$(NEWEST) $(NEWEST)/bin/python
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-input --upgrade --upgrade-strategy eager \
		-e ".[test]" $(held_torch)
	$(if $(UPSTREAM),$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-input --upgrade $(UPSTREAM))
	-$(NEWEST)/bin/python -m pip check
	@touch $(NEWEST)/.installed-test
	$(these_versions) VENV=$(NEWEST) EXTRA=test TESTS="$(or $(TESTS),$(smoke_test) $(version_tests))"

# Each in a folder of its own: the pinned one, the lowest that is allowed, and that of the GPUs the kernels are tuned for.
tritons := $(addprefix $(VENV)/triton-,$(TRITONS))
$(tritons): $(VENV)/triton-%: | $(VENV)/.installed-dev
	rm -rf $@.new
	$(bin)/python -m pip install --disable-pip-version-check --no-input --no-deps --target $@.new triton==$*
	rm -rf $@ && mv $@.new $@

test-kernels: $(tritons)
	for triton in $^; do echo "$$triton"; PYTHONPATH=$(abspath $(VENV))/$$(basename $$triton) \
		$(pytest) -m "not gpu" tests/ops/test_triton_compiles.py $(PYTEST_ARGS) || exit 1; done

style: $(VENV)/.installed-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

quality: $(VENV)/.installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

# Strict: a link or reference that leads nowhere ends it.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict

# A few minutes. A notebook that fails stays as it was.
notebooks: $(VENV)/.installed-dev
	$(bin)/python notebooks/execute.py $(NOTEBOOKS)

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist site *.egg-info
	find mhla_hf tests conversion -name __pycache__ -type d -prune -exec rm -rf {} +
