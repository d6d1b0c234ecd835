# `make demo` and `make test` set up everything they need in .venv; a machine needs python3 >= 3.10 with venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SPECS := $(sort $(wildcard specs/*.kcp))
READY := $(VENV)/.kcpgen-ready
PINS := requirements-test.txt

.PHONY: demo test check-generated lint types unit sm90 generated clean

demo: $(READY)
	$(BIN)/kcpgen build specs/kda.kcp
	$(BIN)/python examples/demo.py
	$(BIN)/kcpgen verify specs/kda.kcp --quick

test: check-generated lint types sm90 unit

check-generated: $(READY)
	$(BIN)/kcpgen build --check $(SPECS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2

# Every kernel compiled for a GPU that need not be here, with its registers, stack and shared memory.
sm90: $(READY)
	ls -d generated/*/ | xargs -n 1 -P 2 $(BIN)/python -m kcpgen.verify.resources

generated: $(READY)
	$(BIN)/kcpgen build $(SPECS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml $(PINS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' $(PINS))"
	grep -v '^torch==\|^triton==' $(PINS) | $(BIN)/pip install --quiet -r /dev/stdin
	$(BIN)/pip install --quiet --no-deps --no-build-isolation "$$(grep '^triton==' $(PINS))" -e .
	touch $@
