# The commands that people and scripts rely on. They leave a .venv here and a cache in the user's
# cache directory; a result goes to stdout, everything else to stderr.

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install

# What `make test` does, in this order: all of it, whatever fails. Each is a target too.
STAGES  := lint patches native python engine docs-check
# Tests have directories, sockets and ports of their own, but for those of documents.
WORKERS := --numprocesses logical --maxprocesses 4 --dist worksteal
# What `make nightly` does, for one to four hours; what it finds is in REPORTS.
NIGHTLY := nightly-fuzz nightly-validate nightly-bench
REPORTS := reports

.PHONY: run test $(STAGES) nightly $(NIGHTLY)
.PHONY: bench bench-overheads bench-relaunch bench-relay bench-alternate
.PHONY: docs engine-path model-path clean

run: .venv/installed
	$(BIN)/llamactl up

test:
	@ci/stages $(MAKE) $(STAGES)

lint: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

patches: .venv/installed-test
	$(BIN)/python -m llamactl_builder verify

native python engine docs-check: .venv/installed-test
	$(BIN)/python -m pytest --stage $@ $(if $(filter-out docs-check,$@),$(WORKERS))

nightly:
	@ci/stages $(MAKE) $(NIGHTLY)

# An input that crashes is left in the directory of its test, in the reports.
nightly-fuzz: .venv/installed-test $(REPORTS)
	LLAMACTL_FUZZ_S=1200 $(BIN)/python -m pytest tests/test_native_fuzz.py -o faulthandler_timeout=0 --basetemp $(REPORTS)/fuzz

nightly-validate: .venv/installed $(REPORTS)
	$(BIN)/llamactl validate --full --junit $(REPORTS)/validate.xml

# Measured once, told twice: every round for programs, the tables and plots for people.
nightly-bench: .venv/installed-test $(REPORTS)
	$(BIN)/llamactl bench --baseline unpatched --budget 3h --json > $(REPORTS)/bench.json
	$(BIN)/llamactl bench --baseline unpatched --budget 1s --resume --markdown --plots $(REPORTS) > $(REPORTS)/bench.md

$(REPORTS):
	mkdir -p $@

bench: .venv/installed
	$(BIN)/llamactl bench --baseline unpatched $(BENCH)

bench-overheads: .venv/installed
	$(BIN)/python bench/overheads.py

bench-relaunch: .venv/installed
	$(BIN)/python bench/relaunch.py

bench-relay: .venv/installed
	$(BIN)/python bench/relay.py

bench-alternate: .venv/installed
	$(BIN)/python bench/alternate.py

# The documents that are made of the code; a test holds them against it.
docs: .venv/installed
	$(BIN)/python -m llamactl_supervisor describe openapi > docs/openapi.json
	$(BIN)/python -m llamactl_supervisor describe api > docs/control-api.md
	$(BIN)/python -m llamactl_supervisor describe metrics > docs/metrics.md
	$(BIN)/python -m llamactl_cli config docs > docs/configuration.md

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
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache $(REPORTS)
