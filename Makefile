# Every target makes .venv itself; PYTHON=... chooses another interpreter.
VENV := .venv
BIN := $(VENV)/bin
KERNEL := $(VENV)/kernel
OLDEST := $(VENV)/oldest
NEWEST := $(VENV)/newest
SITE := $(VENV)/docs
# $(VENV) is made without byte code: where none may be written, every process would compile torch and vLLM anew.
unexport PYTHONDONTWRITEBYTECODE

PARTS := kernel engines ranks models oldest newest install docs large

.NOTPARALLEL:
.PHONY: help setup demo test nightly $(PARTS:%=nightly-%) docs gpu lint clean

help:
	@echo "make setup   make or update $(VENV) from the lock files (minutes once, then seconds)"
	@echo "make demo    answer questions from a few documents, with and without blending, and from LangChain and LlamaIndex"
	@echo "make test    lint, type check, unit tests, engine tests, of all three packages"
	@echo "             while you work: $(BIN)/pytest -n auto tests/unit, which needs no engine"
	@echo "make nightly all that takes longer, in parts, or only those in PART='...':"
	@echo "             kernel   the GPU kernel for attention, without a GPU (200 MB of Triton once, then two minutes)"
	@echo "             engines  engines of other kinds: structures, weights, budgets, trees, keys; benches"
	@echo "             ranks    several ranks, engines or API servers, which want all cores (with engines: 30 minutes)"
	@echo "             models   many kinds of models; writes the table of docs/models.md (20 minutes)"
	@echo "             oldest   on the oldest vLLM and other packages that are promised (470 MB once, then a quarter of an hour)"
	@echo "             newest   what is used of the newest vLLM that is promised is there (340 MB once, then seconds)"
	@echo "             install  what is published; README from it; clients: weight, oldest packages, neighbours (200 MB, minutes)"
	@echo "             docs     the manual as a site: its links, that all is in it (40 MB once, then seconds)"
	@echo "             large    ten minutes of load, 10,000 malformed requests, a million texts, kills (22 minutes)"
	@echo "make docs    the manual as a site, in build/site"
	@echo "make gpu     on a machine with a GPU: what runs there, with tables (28 minutes; STAGE=... for one stage)"
	@echo "make lint    lint, type check and the order of packages only"
	@echo "make clean   remove $(VENV) and every cache folder of the tools"

setup:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash requirements/setup.sh

# As the command does by itself: where bfloat16 is slow, float32.
DTYPE = from blendrag.machine import emulates_16_bit as slow; print("float32" if slow() else "auto")
EXAMPLE = BLENDRAG_DTYPE=$${BLENDRAG_DTYPE:-$$($(BIN)/python -c '$(DTYPE)')} $(BIN)/python

demo: setup
	@$(BIN)/blendrag demo
	@echo; echo "The same from a LangChain chain (examples/langchain_chain.py):"; echo
	@$(EXAMPLE) examples/langchain_chain.py
	@echo; echo "and from a LlamaIndex query engine (examples/llamaindex_query_engine.py):"; echo
	@$(EXAMPLE) examples/llamaindex_query_engine.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Without xdist's reordering: a worker's engine for all of the run would start before those of other tests.
PARTED = $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder

test: lint
	$(PARTED)

nightly: $(addprefix nightly-,$(or $(PART),$(PARTS)))

$(KERNEL) $(OLDEST) $(NEWEST) $(SITE): $(VENV)/%: requirements/%.lock
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target $@ -r $<
	@touch $@

# Apart from the other packages: torch and vLLM change what they do where they find Triton.
nightly-kernel: setup
	@$(MAKE) --no-print-directory $(KERNEL)
	TRITON_INTERPRET=1 PYTHONPATH="$(abspath $(KERNEL)):$$PYTHONPATH" $(BIN)/pytest -q \
		tests/unit/attention tests/unit/engine/test_paged_cache.py tests/unit/engine/test_gpu_backends.py \
		tests/unit/load/test_layer_decode.py tests/gpu/test_tensors.py

nightly-engines: setup
	$(PARTED) -m "nightly $(foreach part,ranks models docs large,and not nightly(part='$(part)'))"

nightly-ranks nightly-large: nightly-%: setup
	$(BIN)/pytest -m "nightly(part='$*')"

nightly-models: setup
	UPDATE_MODELS=1 $(BIN)/pytest -m nightly tests/unit/engine/test_structures.py
	$(BIN)/pytest -m "nightly(part='models')" tests/engine

nightly-newest: setup
	@$(MAKE) --no-print-directory $(NEWEST)
	PYTHONPATH="$(abspath $(NEWEST)):$$PYTHONPATH" $(BIN)/python tests/helpers/imported_names.py $(NEWEST)

nightly-install: setup
	@$(BIN)/python tests/helpers/fresh_install.py

docs: setup
	@$(MAKE) --no-print-directory $(SITE)
	@mkdir -p build
	$(BIN)/python -m typer blendrag.cli.app utils docs --name blendrag > build/commands.md
	PYTHONPATH="$(abspath $(SITE)):$$PYTHONPATH" $(BIN)/python -m zensical build --strict

nightly-docs: docs
	$(BIN)/pytest -m "nightly(part='docs')" tests/docs

# In front of the other packages, which are new enough for it. Of tests that start engines of their own, those of
# asynchronous claims. The functions by which three files lay out caches came later.
nightly-oldest: setup
	@$(MAKE) --no-print-directory $(OLDEST)
	PYTHONPATH="$(abspath $(OLDEST)):$$PYTHONPATH" $(BIN)/pytest -q -m "not own_engine" tests/unit/engine tests/engine \
		$(addprefix --ignore tests/unit/engine/test_,paged_cache.py head_pages.py gpu_backends.py)
	PYTHONPATH="$(abspath $(OLDEST)):$$PYTHONPATH" $(BIN)/pytest -q tests/unit/cli tests/unit/index tests/unit/store \
		tests/unit/lab/evaluate tests/unit/test_models.py

# In the environment that is active, or PYTHON's: that of $(VENV) computes on the CPU.
STAGES = PYTHONPATH="$(CURDIR):$$PYTHONPATH" MODEL="$(MODEL)" OUT="$(OUT)" \
	$(or $(PYTHON),python3) tests/gpu/stages.py $(STAGE)

gpu:
	$(eval REFUSED := $(shell $(STAGES) --check))$(if $(REFUSED),$(error $(REFUSED)))
	@$(STAGES)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find blendrag tests integrations -name __pycache__ -type d -prune -exec rm -rf {} +
