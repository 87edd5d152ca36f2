# What a person does with this repository. Everything is made inside it, in .venv* folders; `make clean` takes those away.
# Settings: PYTHON=/path/to/python (3.11 or newer; empty: the first one found)
#           TORCH_INDEX_URL=… (an extra package index that carries another build of torch; see README, "Which torch")
PYTHON ?=
TORCH_INDEX_URL ?=
export PYTHON TORCH_INDEX_URL
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := .venv/bin
HAS_SERVER := .venv/.has-server
HAS_DEV := .venv/.has-dev
HAS_FLOOR := .venv-floor/.has-dev
HAS_PROTOS := .venv-protos/.has-protos

.PHONY: help demo test test-full check protos clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(HAS_SERVER) ## start a server with the default model, stream one answer, stop
	@$(BIN)/python scripts/demo.py

test: $(HAS_DEV) ## run the tests, without the long ones
	@echo "test: the whole suite but the tests marked full"
	@$(BIN)/python -m pytest

test-full: $(HAS_DEV) $(HAS_FLOOR) ## run all tests, and once more on the lowest supported versions
	@echo "test-full: the whole suite, long tests and real peers included"
	@$(BIN)/python -m pytest -m ""
	@echo "test-full: the tests marked floor, on the lowest supported versions (.venv-floor)"
	@.venv-floor/bin/python -m pytest -m floor

check: $(HAS_DEV) $(HAS_PROTOS) ## format, lint, types, imports, protos and their stubs
	@echo "check: ruff format"  && $(BIN)/ruff format --check .
	@echo "check: ruff"         && $(BIN)/ruff check .
	@echo "check: mypy"         && $(BIN)/mypy
	@echo "check: lint-imports" && $(BIN)/lint-imports --no-logo
	@echo "check: buf lint"     && $(BIN)/buf lint
	@echo "check: buf format"   && $(BIN)/buf format --diff --exit-code
	@echo "check: stubs"        && scripts/protos --check

protos: $(HAS_PROTOS) ## make the Python stubs of protos/ anew
	@echo "protos: delete the stubs and generate them again"
	@scripts/protos

clean: ## take away all that the other targets made here
	@echo "clean: virtual environments, caches, build results"
	@rm -rf .venv .venv-floor .venv-protos dist .*cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(HAS_SERVER): scripts/install constraints.txt pyproject.toml
	@scripts/install server constraints.txt $@

$(HAS_DEV): scripts/install constraints.txt pyproject.toml
	@scripts/install server,dev constraints.txt $@
	@touch $(HAS_SERVER)

$(HAS_FLOOR): scripts/install constraints-floor.txt pyproject.toml
	@scripts/install server,dev constraints-floor.txt $@

$(HAS_PROTOS): scripts/install constraints-protos.txt
	@scripts/install - constraints-protos.txt $@
