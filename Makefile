# Needs nothing but make and Python 3.11 or later; `make help` lists what there is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests run in so many processes at once.
WORKERS ?= 2
# More for pytest, for example: make test PYTEST_ARGS="-x tests/laws/test_layers.py"
PYTEST_ARGS ?=
# Other Pythons, versions of torch and extras: make matrix MATRIX_ARGS="--python python3.12 --torch 2.12.1 --extras demo"
MATRIX_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help device-test demo ui-demo pictures tutorials notebooks gallery atlas benchmark reproductions research-test test test-all slow lint prose types format table bench dist matrix docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  \1\t/'

demo: $(VENV)/.stamp-demo ## compare six ways to train four nodes on the digits data set
	$(BIN)/exogym demo

ui-demo: $(VENV)/.stamp-ui,demo ## train three ways, and show it in the browser: prints the address
	$(BIN)/exogym compare --dataset digits --strategies ddp,diloco,fedavg --nodes 4 --seeds 1 & \
	$(BIN)/exogym ui; wait

test: lint types device-test ## everything a change must pass: format, lint, types, tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(PYTEST_ARGS)

test-all: lint types ## the fast tests and the slow ones, and the share of lines that they run (hours)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" --cov --cov-report=term $(PYTEST_ARGS)

device-test: $(VENV)/.stamp-dev ## the tests of accelerators, on a fake one that is compiled first; needs a C++ compiler
	EXOGYM_FAKE_DEVICE=1 $(BIN)/python -m pytest tests/device

slow: $(VENV)/.stamp-dev ## the tests that take minutes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev ## check format, code and prose, change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/site/prose.py

prose: $(VENV)/.stamp-dev ## print words, sentence length and readability of each page
	$(BIN)/python docs/site/prose.py --measure

types: export MYPY_NUM_WORKERS = $(WORKERS)
types: $(VENV)/.stamp-dev ## check types; mypy's workers must start in 3 s, so a busy machine does without them
	$(BIN)/mypy exogym || { test $$? -eq 2 && MYPY_NUM_WORKERS=0 $(BIN)/mypy exogym; }

format: $(VENV)/.stamp-dev ## put the code into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

table: $(VENV)/.stamp-dev ## write the tables anew: strategies, and the earlier runs that advise knows
	$(BIN)/python tests/strategies.py
	$(BIN)/python -m research.shipped

pictures: $(VENV)/.stamp-dev ## draw the pictures of README, the diagrams and docs/ui.md anew; needs chromium and chromium-driver
	$(BIN)/python docs/images/ui.py
	$(BIN)/python docs/images/diagrams.py
	$(BIN)/python docs/images/gallery.py local_steps

tutorials: $(VENV)/.stamp-dev ## run the tutorials, and take the pictures in them anew
	cd docs/images && for each in ../../tutorials/*.py; do $(CURDIR)/$(BIN)/python $$each || exit 1; done
	cd docs/images && rm -rf runs better texts train.py my_loop.py *hosts.json measured.json result_*.json model-*.pt node-*.pt

notebooks: $(VENV)/.stamp-dev ## write the tutorials as Jupyter notebooks into notebooks/
	mkdir -p notebooks
	for each in tutorials/*.py; do \
	  $(BIN)/jupytext --quiet --to ipynb --output notebooks/$$(basename $$each .py).ipynb $$each || exit 1; done

gallery: $(VENV)/.stamp-dev ## train the comparisons of docs/evidence.md anew, and draw their pictures
	$(BIN)/python docs/images/gallery.py

benchmark: $(VENV)/.stamp-examples ## measure the table of methods anew (less than an hour; rerun it to continue) and write its page in research/
	$(BIN)/python -m research benchmark --page research/results/benchmark.md

reproductions: $(VENV)/.stamp-examples ## train the claims of papers anew (hours; rerun it to continue) and write their page in research/
	$(BIN)/python -m research reproduce --page research/results/reproductions.md

atlas: $(VENV)/.stamp-examples,search ## tune every method alike (days; rerun it to continue) and write the page in research/
	$(BIN)/python -m research benchmark --trials 8 --page research/results/atlas.md

research-test: $(VENV)/.stamp-dev ## test the studies in research/
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal research $(PYTEST_ARGS)

dist: $(VENV)/.stamp-dev ## build the source distribution and the wheel into dist/
	umask 022 && $(BIN)/python -m uv build --quiet --build-constraints constraints.txt --out-dir dist

matrix: $(VENV)/.stamp-dev ## install the wheel into empty environments, with each extra alone, and try it (half an hour)
	$(BIN)/python tests/environments.py $(MATRIX_ARGS)

docs: $(VENV)/.stamp-docs ## build the site into site/, to be opened there or served from any folder
	$(BIN)/python docs/site/build.py
	$(BIN)/python docs/site/llms.py
	@echo "the site is there: open site/index.html"

bench: $(VENV)/.stamp-dev ## measure the core
	$(BIN)/python benchmarks/core.py

clean: ## remove what checks and builds leave (.venv and runs/ stay)
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One intra-op thread: tests compare bits, and a second thread on a busy machine costs more than it gives.
test test-all slow device-test research-test bench benchmark reproductions atlas pictures tutorials: export OMP_NUM_THREADS = 1
# Else every worker compiles every test file and the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

# A stamp says that its extra is installed; it goes stale with the files that say what to install.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(VENV) has a Python older than 3.11; remove $(VENV) and run make with PYTHON=python3.11 or later" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
		{ echo "error: $(VENV) has no pip; remove $(VENV) and run make again" >&2; exit 1; }
	@echo "installing exogym[$*] into $(VENV) (the first time fetches PyTorch: minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: '$(PYTHON)' is not a Python 3.11 or later; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: '$(PYTHON)' cannot make a virtual environment with pip; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
