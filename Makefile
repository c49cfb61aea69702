# `make serve`, `make demo` and `make test` need Python 3.11 or newer and nothing else installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests start many servers and engines, each of which would otherwise compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Files run in alphabetical order: the small ones of tests/unit, last, keep all workers busy to the end.
PYTEST := $(BIN)/python -m pytest -rs -n auto --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder -p no:schemathesis
# On a terminal pip shows its progress. Python compiles each module when it is first imported: most of
# what is installed never is.
PIP := $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check \
	--no-compile -c constraints.txt

.PHONY: serve demo soak fuzz test pytest test-all test-nightly test-gpu test-ray test-floors verify-peers check style types format bench clean

# A small language model, fetched once; the demo models where it cannot be fetched. Options go behind
# `strobe serve` itself: .venv/bin/strobe serve --help
serve: $(VENV)/.installed
	@target=smollm2; \
	$(BIN)/strobe pull smollm2 >/dev/null || { [ $$? -ne 130 ] || exit 130; target=; }; \
	exec $(BIN)/strobe serve $$target

demo: $(VENV)/.installed
	$(BIN)/strobe demo

# Everything that a change is likely to break; at most eight minutes on two cores. Tests depend on no
# order: pytest --random-order shuffles them and prints its seed.
test: $(VENV)/.dev
	$(MAKE) --jobs=2 style types pytest

pytest: $(VENV)/.dev
	$(PYTEST) -m "not full"

# More of the matrices, the page in Chromium, the wheel, longer soaks. CI runs both.
test-all: $(VENV)/.dev
	$(PYTEST) -m "full and not nightly"

# What rarely finds more than the others: further cells of matrices, the page in Firefox, kernels
# compiled for further GPUs. CI runs it each night.
test-nightly: $(VENV)/.dev
	$(PYTEST) -m nightly

# Five minutes of 1,000 streams, broken requests and clients that leave; half an hour with few pages
# and host memory; 10,000 faults at random stages of steps; schemathesis in full.
soak: $(VENV)/.dev
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak.py --small-pool --streams 100 --seconds 1800
	$(BIN)/python -m tests.support.random_faults --faults 10000
	$(BIN)/python benchmarks/schema.py

# Ten minutes of random engines, each answer compared with a lone plain run; on a GPU where there is one.
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.support.random_engines --minutes $(or $(MINUTES),10) --workers $(or $(WORKERS),$(shell nproc))

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

# Replicas on a Ray cluster of this machine. Ray is too large to be installed with the rest.
test-ray: $(VENV)/.dev
	$(PIP) -e ".[ray]"
	$(BIN)/python -m pytest -p no:schemathesis tests/server/test_ray.py

# The lowest versions that pyproject.toml allows, in build/floors: 6 GB with torch's floor, or
# `make test-floors TORCH=2.13.0` with another release of torch.
test-floors: $(VENV)/.installed
	$(BIN)/python scripts/floors.py $(if $(TORCH),--torch $(TORCH))

# Strobe and vLLM's CPU build on SmolLM2 and its drafter, compared by `strobe verify`, in
# build/verify-peers: 2 GB. PEER_OPTIONS="--vllm-python PATH" uses an environment that has vLLM.
verify-peers: $(VENV)/.dev
	$(BIN)/python -m scripts.verify_peers $(PEER_OPTIONS)

check: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/basedpyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/serving.py

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.exit('Strobe needs Python 3.11 or newer, this is ' + sys.version.split()[0] if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Strobe and what it depends on in $(VENV), once; this takes a minute or two."
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing Strobe and what its tests need in $(VENV), once; this takes a minute or two."
	$(PIP) -e ".[dev]"
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
