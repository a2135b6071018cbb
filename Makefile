# The commands that people and scripts rely on. They leave a .venv here and a cache in the user's
# cache directory; a result goes to stdout, everything else to stderr.

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install

.PHONY: run test bench bench-pages bench-overheads engine-path model-path clean

run: .venv/installed
	$(BIN)/llamactl up

test: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m llamactl_builder verify
	$(BIN)/python -m pytest

bench: .venv/installed
	$(BIN)/python bench/reconfigure.py

bench-pages: .venv/installed-test
	PYTHONPATH=tests $(BIN)/python bench/pages.py

bench-overheads: .venv/installed
	$(BIN)/python bench/overheads.py

engine-path model-path: .venv/installed
	@$(BIN)/python -m llamactl_builder $@

.venv/installed: pyproject.toml
	@$(PYTHON) -m venv .venv >&2
	@$(PIP) --editable . >&2
	@touch $@

.venv/installed-test: pyproject.toml
	@$(PYTHON) -m venv .venv >&2
	@$(PIP) --editable '.[test]' >&2
	@touch .venv/installed $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
