# Two commands for newcomers: make demo, make test. Each makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
MINDSPORE_VENV ?= $(VENV)-mindspore
BIN := $(VENV)/bin

.PHONY: demo test test-torch test-mindspore support bench bench-peers format clean

demo: $(VENV)/.ready
	$(BIN)/regrow demo

test: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The platform tests on MindSpore, in an environment of its own: it has no torch, and the fixtures above are left out.
test-mindspore: $(MINDSPORE_VENV)/.ready
	REGROW_PLATFORM=mindspore PYTHONPATH=src $(MINDSPORE_VENV)/bin/python -m pytest \
		--confcutdir=tests/platforms --override-ini filterwarnings= tests/platforms

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/host_cost.py

# The tests on another version of torch, in an environment of its own: make test-torch TORCH=2.14.1
test-torch:
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.14.1"; exit 2; }
	test -x $(VENV)-torch-$(TORCH)/bin/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' torch==$(TORCH)
	$(VENV)-torch-$(TORCH)/bin/python -m pytest

# Writes docs/support.md and the file of this torch's version. For another version:
# REGROW_WRITE_SUPPORT=1 make test-torch TORCH=2.14.1
support: $(VENV)/.ready
	REGROW_WRITE_SUPPORT=1 $(BIN)/python -m pytest -m support

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

$(MINDSPORE_VENV)/.ready: Makefile
	$(PYTHON) -m venv $(MINDSPORE_VENV)
	@echo "installing MindSpore into $(MINDSPORE_VENV): about 800 MB, a minute or two"
	$(MINDSPORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		'mindspore==2.10.0' 'numpy<2' 'pytest>=8'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
