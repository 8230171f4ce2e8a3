# Every target installs what it needs into .venv first; test-xla has an environment of its own, .venv-xla.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := protos bundle targets edge execution compiler_svc runtime_svc clients/python
# Names and versions of all that is installed, but for torch, whose version deploy/install-torch has.
CONSTRAINTS := deploy/constraints.txt
PACKAGES := bundle targets edge execution compiler_svc runtime_svc kiln_client
SOURCES := bundle targets edge execution compiler_svc runtime_svc clients/python tests examples bench deploy
WIRE_RULES := {"version": "v2", "modules": [{"path": "."}], "breaking": {"use": ["WIRE_JSON"], "ignore": ["google"]}}
PROTOS := $(sort $(shell find protos/kiln -name '*.proto'))

MINUTES ?= 30
# Slow test files for `make test-slow`; where `make test` writes what became of each test.
FILES ?=
OUTCOMES ?=

# Services and commands start hundreds of times in a run: what their modules compile to is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup lock demo test test-slow test-report test-quarantine test-full test-xla check lint fmt protos protos-check
.PHONY: docs bench bench-large bench-formats bench-peers soak first-hour clean

# pip would compile on one core what compileall compiles on all. What does not compile is for other versions of Python.
setup: $(VENV)/.installed $(VENV)/.prebuilt

$(VENV)/.installed: pyproject.toml $(DISTRIBUTIONS:=/pyproject.toml) $(wildcard execution/native/*) deploy/install-torch $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint $(CONSTRAINTS) pip setuptools
	deploy/install-torch $(BIN)/python --quiet --no-compile --constraint $(CONSTRAINTS)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) \
	  --no-build-isolation $(foreach d,$(DISTRIBUTIONS),--editable '$(d)$(EXTRAS)') --group dev
	$(BIN)/python -m compileall -qq -j 0 $(CURDIR)/$(VENV)/lib || true
	touch $@

# What every library shares, which the first compile would make: it takes torch, which is there only now.
$(VENV)/.prebuilt: $(VENV)/.installed $(wildcard compiler_svc/lower/kernels/* compiler_svc/lower/*.cpp) \
  $(addprefix compiler_svc/lower/,adapt.py attend.py common_objects.py inductor.py linear.py prebuilt.py tables.py top.py)
	$(BIN)/python -m compiler_svc.lower.prebuilt
	touch $@

# The newest of all that our distributions and their extras allow, for all who install.
lock:
	rm -rf build/lock
	$(MAKE) build/lock/.installed VENV=build/lock CONSTRAINTS=/dev/null 'EXTRAS=[hf,hub,openai,postgresql,s3,tracing,vllm-engine]'
	build/lock/bin/python -m pip freeze --all --exclude-editable --exclude torch >build/lock/constraints.txt
	mv build/lock/constraints.txt $(CONSTRAINTS)

# Compile the shipped tiny model, load it, stream text, swap to the fine-tune, stream again.
demo: setup
	$(BIN)/python examples/demo.py

# What decides in CI: the static checks, then every test but the slow ones. Four workers for two cores, because many
# tests wait for processes; a file to each at a time, in the order of tests/rings.py: the longest first. What takes
# over 30 s is listed.
test: lint
	$(BIN)/python -m pytest -m "not slow" --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 3 \
	  --durations 0 --durations-min 30 $(if $(OUTCOMES),-p tests.turns.outcomes --outcomes $(OUTCOMES))

# The slow tests of what changed since yesterday, or of FILES.
test-slow: setup
	$(BIN)/python -m tests.turns $(FILES)

# What slow and flaky tests came to in earlier runs.
test-report: setup
	$(BIN)/python -m tests.turns --report

# Runs each test of tests/quarantine.toml twenty times, and takes out those that pass each time.
test-quarantine: setup
	$(BIN)/python -m tests.turns.quarantine

# Everything. The parity matrix goes on where an interrupted run stopped, and writes docs/models.md.
test-full: lint
	KILN_FUZZ_SHARE=1 $(BIN)/python -m pytest --ignore=tests/parity
	$(BIN)/python -m tests.parity

# Every family on an XLA device of the CPU, under the torch that Neuron's compiler needs. Downloads 1 GB once; skipped
# with a reason if the environment cannot be made, which KILN_REQUIRE_TOOLS=1 makes a failure.
test-xla:
	$(PYTHON) -m tests.device.xla

# The rings that start nothing: what to run before every push.
check: lint
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile tests/architecture tests/unit

lint: setup protos-check
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(foreach p,$(PACKAGES),-p $(p))
	$(BIN)/lint-imports --no-cache
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --exclude-path google --diff --exit-code
	cd protos && ../$(BIN)/buf breaking --against v0.2.binpb
	cd protos && ../$(BIN)/buf breaking --against v0.1.binpb --config '$(WIRE_RULES)'

fmt: setup
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	cd protos && ../$(BIN)/buf format --exclude-path google --write

# Generated code is committed: stubs beside the protos, messages in the TypeScript client.
protos: setup
	$(call generate,protos)
	cd clients/typescript && npm run setup && npm run generate

protos-check: setup
	rm -rf build/protos && mkdir -p build/protos
	$(call generate,build/protos)
	diff -r --exclude='*.proto' --exclude=__pycache__ --exclude=__init__.py --exclude=py.typed build/protos/kiln protos/kiln

define generate
	$(BIN)/python -m grpc_tools.protoc -Iprotos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	  $(PROTOS:protos/%=%)
endef

# Pages, and what `kiln config reference` and `kiln errors` print, made from the code.
docs: setup
	$(BIN)/python -m tests.architecture.error_table
	$(BIN)/python -m tests.architecture.config_reference
	$(BIN)/python -m tests.architecture.sampling_table
	$(BIN)/python -m tests.architecture.scope_table
	$(BIN)/python -m tests.architecture.leftover_table

# What six kinds of new users do in their first hour, on a fresh clone of the last commit; writes docs/first-hour.md.
first-hour: setup
	$(BIN)/python -m tests.first_hour

# The peers that an earlier call has installed stay. Those that cannot be installed are named at the start of a run.
bench-peers: setup
	$(BIN)/python -m bench.peers.install

bench: bench-peers
	$(BIN)/python -m bench

# A model of 1.1 B parameters; takes about 16 GiB.
bench-large: bench-peers
	$(BIN)/python -m bench --large

# Quantized weights and caches; `python -m bench --formats --large` is the same with 1.1 B parameters.
bench-formats: bench-peers
	$(BIN)/python -m bench --formats

# Half an hour of faults under 64 streams: `make soak MINUTES=2 SEED=7` for other lengths, and to repeat a run's choices.
soak: setup
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf $(VENV) .venv-xla .kiln build compiler_svc/lower/prebuilt_files clients/typescript/node_modules clients/typescript/dist clients/typescript/build
