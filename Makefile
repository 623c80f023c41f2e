# Two commands: `make run` answers a question with the demo model, `make test` runs the tests.
# Both set up what they need: uv (into .tools, if there is none), ggml compiled for this CPU, the demo model.
.PHONY: run test lint setup setup-tests browser clean

PYTHON ?= python3
QUESTION ?= Why is the sky blue? Answer in two sentences.
RUN_FLAGS ?= --dram 900MiB
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)

run: setup
	@echo "lever: asking the demo model: $(QUESTION)" >&2
	@$(UV) run --no-sync lever run demo "$(QUESTION)" $(RUN_FLAGS)

test: setup-tests
	@$(UV) run --no-sync pytest $(PYTEST_FLAGS)

lint: setup-tests
	@$(UV) run --no-sync ruff check
	@$(UV) run --no-sync ruff format --check
	@$(UV) run --no-sync mypy

setup: $(UV)
	@echo "lever: setting up: packages, ggml compiled for this CPU (about a minute the first time), demo models (1.6 GB)" >&2
	@$(UV) sync --inexact --extra demo

setup-tests: $(UV) browser
	@echo "lever: setting up: packages, ggml compiled for this CPU (about a minute the first time), demo models (1.6 GB)" >&2
	@$(UV) sync --inexact --all-extras --group dev

# The page is tested in Debian's Chromium. Without apt-get, or rights to use it, those tests are skipped and say so.
browser:
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "lever: installing chromium, for the tests of the page" >&2; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; \
	fi

# Only reached where uv is not on the PATH.
.tools/bin/uv:
	@echo "lever: fetching uv into .tools" >&2
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { \
	  echo "lever: $(PYTHON) has no pip; on Debian and Ubuntu: apt-get install python3-pip" >&2; exit 1; }
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --target .tools uv

clean:
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
