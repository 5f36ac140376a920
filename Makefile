# Every target sets up what it needs on a machine that has only Python and pip.

PYTHON ?= python3
VENV := .venv
OLDEST_VENV := .venv-oldest
BIN := $(VENV)/bin
PLUGINS := plugins/grouped_gemm
# Tests run side by side, a thread each: tiny models gain nothing from more.
PYTEST := -m pytest -n auto --maxprocesses 4 --dist worksteal
test test-oldest test-slow: export OMP_NUM_THREADS := 1

.PHONY: demo test test-oldest test-slow lint clean

demo: $(VENV)/ready
	$(BIN)/hf-moe-backends demo

test: $(VENV)/ready lint
	$(BIN)/python $(PYTEST)
	cd conformance && ../$(BIN)/python $(PYTEST)
	for plugin in $(PLUGINS); do (cd $$plugin && $(CURDIR)/$(BIN)/python -m pytest) || exit 1; done

# The same on the oldest supported Transformers. What wheels hold does not depend on it.
test-oldest: $(OLDEST_VENV)/ready
	$(OLDEST_VENV)/bin/python $(PYTEST)
	cd conformance && ../$(OLDEST_VENV)/bin/python $(PYTEST) --ignore tests/test_author.py

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow
	cd conformance && ../$(BIN)/python -m pytest -m slow

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd conformance && ../$(BIN)/mypy
	for plugin in $(PLUGINS); do (cd $$plugin && $(CURDIR)/$(BIN)/mypy) || exit 1; done

$(VENV)/ready: pyproject.toml conformance/pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --editable conformance \
		$(addprefix --editable ,$(PLUGINS)) --group dev
	touch $@

$(OLDEST_VENV)/ready: pyproject.toml conformance/pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(OLDEST_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable . --editable conformance --group test
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist *.egg-info conformance/build conformance/*.egg-info
