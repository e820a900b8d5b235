# Two commands for newcomers: make demo, make test. Each makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-torch bench bench-peers format clean

demo: $(VENV)/.ready
	$(BIN)/regrow demo

test: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/host_cost.py

# The tests on another version of torch, in an environment of its own: make test-torch TORCH=2.14.1
test-torch:
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.14.1"; exit 2; }
	test -x $(VENV)-torch-$(TORCH)/bin/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,test]' torch==$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pytest

# torch-remat beside the rest, in an environment of its own.
bench-peers:
	test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' torch-remat==0.2.2
	$(VENV)-peers/bin/python benchmarks/save_regions/measure.py

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the tools into $(VENV): about 1 GB, a minute or two"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
