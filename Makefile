# Everything runs in an environment of its own, .venv, made from constraints.txt; nothing needs to be installed first.
# What checks the health page, too, compiles one dependency of py-libp2p: on Debian that takes gcc and libgmp-dev.
# The tools of `make lock` and `make audit` have another one, .venv-tools: nothing that runs depends on them.
# Programs that the gateway is tested with have four, in .venv-clients: some want openai 3, some want openai 2, and the
# two load generators want versions of their own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HEALTH := $(VENV)/.installed-health
PYTEST_ARGS ?=
SEEDS ?= 0:200
PARSER ?=
CASES ?= 100000
EXECUTIONS ?= 10000000
SECONDS ?= 3600
TOOLS := .venv-tools
CLIENTS := .venv-clients
SBOM := build/sbom.cdx.json

.PHONY: help demo test test-long simulate fuzz mutate docs lint format install clients real-model lock audit clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       run a whole swarm on this machine, on the small checkpoint that is part of the package"
	@echo "make test       the tests, lint among them (5 minutes on 2 cores)"
	@echo "make test-long  what takes longer, the sweeps in full (less than 45 minutes on 2 cores)"
	@echo "make simulate   swarms on a virtual clock, SEEDS=0:200 (docs/simulation.md)"
	@echo "make fuzz       feed every PARSER for long: Hypothesis' CASES=100000, atheris' EXECUTIONS=10000000 or SECONDS=3600"
	@echo "make mutate     break the code of SECURITY.md's guarantees; the tests that it names must notice (docs/mutants.md)"
	@echo "make docs       write the documents' tables anew, from the code's limits and from benchmarks/results"
	@echo "make lint       ruff, mypy and import-linter"
	@echo "make format     let ruff rewrite what it can"
	@echo "make install    make the environment, $(VENV), and nothing else"
	@echo "make clients    make the environments of the programs that the gateway is tested with, $(CLIENTS)"
	@echo "make real-model fetch a small real model for tests, SmolLM2-135M-Instruct, into the user's cache"
	@echo "make lock       write constraints.lock anew: the hashes of everything in constraints.txt"
	@echo "make audit      write $(SBOM) (CycloneDX) and look all of it up among known vulnerabilities"
	@echo "make clean      remove the environment, caches and builds"

demo: $(STAMP)
	$(BIN)/swarm-demo

# Four processes for two cores: many tests wait for others. Whichever is done first takes over some of another's tests.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist worksteal

test: $(HEALTH)
	$(PYTEST) $(PYTEST_ARGS)

test-long: $(HEALTH) clients real-model
	$(PYTEST) -m long --timeout 900 $(PYTEST_ARGS)

simulate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --departures 6,60 --jobs $$(nproc)

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(addprefix --parser ,$(PARSER)) \
		--cases $(CASES) --executions $(EXECUTIONS) --seconds $(SECONDS)

mutate: $(HEALTH)
	$(BIN)/python -m tests.mutate

docs: $(STAMP)
	$(BIN)/python benchmarks/tables.py

lint: $(HEALTH)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

clients: $(patsubst %,$(CLIENTS)/%/.installed,openai3 openai2 guidellm aiperf)
$(CLIENTS)/openai3/.installed: tests/clients/requirements.txt
$(CLIENTS)/openai2/.installed: tests/clients/requirements-openai2.txt
$(CLIENTS)/guidellm/.installed: tests/clients/requirements-guidellm.txt
$(CLIENTS)/aiperf/.installed: tests/clients/requirements-aiperf.txt

# Only packages of the file are installed: no dependency brings torch. Three of lm-eval's have no wheel: they are built.
# guidellm reads its prompts with torch: it gets the project's version, as the project does, in the build that pip finds.
$(CLIENTS)/%/.installed: $(TOOLS)/.installed
	rm -rf $(@D)
	$(TOOLS)/bin/uv venv --quiet --python $(PYTHON) $(@D)
	$(TOOLS)/bin/uv pip install --quiet --python $(@D)/bin/python --no-deps --only-binary :all: \
		--no-binary rouge-score --no-binary sqlitedict --no-binary word2number -r $(filter %.txt,$^)
	$(if $(filter guidellm,$*),$(TOOLS)/bin/python -m pip --python $(@D)/bin/python install --quiet \
		--disable-pip-version-check $$(grep '^torch==' constraints.txt))
	touch $@

real-model: $(HEALTH)
	$(BIN)/python -m tests.support.real_model

# uv, where it is installed, takes a tenth of pip's time.
UV := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check)

# Debian's python3 cannot put pip into an environment unless python3-venv is installed; its pip can, from outside.
define make_venv
$(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
	|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
endef

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(make_venv)
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

# All extras in one go where there is nothing yet.
$(HEALTH): setup.cfg pyproject.toml constraints.txt
	test -e $(STAMP) && test $(STAMP) -nt setup.cfg && test $(STAMP) -nt constraints.txt || { $(make_venv); }
	$(INSTALL) -c constraints.txt -e '.[dev,health,gateway,integers,real-model,browser,clients]'
	touch $(STAMP) $@

# Everything that the project may install, on any platform, with the hashes of every file that the index has of it.
lock: $(TOOLS)/.installed
	$(TOOLS)/bin/uv pip compile setup.cfg --all-extras --constraint constraints.txt --universal --python-version 3.11 \
		--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --output-file constraints.lock
	for name in requirements requirements-openai2 requirements-guidellm requirements-aiperf; do \
		$(TOOLS)/bin/uv pip compile tests/clients/$$name.in --universal --python-version 3.11 --no-emit-package pip \
			--excludes tests/clients/excluded.txt --no-annotate --custom-compile-command "make lock" --quiet \
			--output-file tests/clients/$$name.txt || exit 1; \
	done

# --strict: a package that could not be looked up is a failure, not a footnote.
audit: $(TOOLS)/.installed
	mkdir -p $(dir $(SBOM))
	$(TOOLS)/bin/cyclonedx-py requirements --output-reproducible --of JSON -o $(SBOM) constraints.lock
	$(TOOLS)/bin/pip-audit --strict --require-hashes --disable-pip -r constraints.lock

$(TOOLS)/.installed: Makefile
	$(PYTHON) -m venv --clear $(TOOLS) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(TOOLS) && $(PYTHON) -m pip --python $(TOOLS)/bin/python install pip; }
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check uv==0.13.8 pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

clean:
	rm -rf $(VENV) $(TOOLS) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
