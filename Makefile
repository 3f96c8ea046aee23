# Every target makes .venv itself; PYTHON=... chooses another interpreter.
VENV := .venv
BIN := $(VENV)/bin
KERNEL := $(VENV)/kernel
OLDEST := $(VENV)/oldest
# $(VENV) is made without byte code: where none may be written, every process would compile torch and vLLM anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test unit kernel engines models compat gpu large lint clean

help:
	@echo "make setup   make or update $(VENV) from the lock files (minutes once, then seconds)"
	@echo "make demo    answer questions from a few documents, with and without blending, and from LangChain and LlamaIndex"
	@echo "make test    lint, type check, unit tests, engine tests, of all three packages"
	@echo "make unit    blendrag's own tests that need no engine, without the slow ones (a minute)"
	@echo "make kernel  tests of the GPU kernel for attention, without a GPU (200 MB of Triton once, then two minutes)"
	@echo "make engines tests of engines of other kinds: structures, weights, budgets, trees, keys, several ranks (30 minutes)"
	@echo "make models  many kinds of models, each with an engine of its own; writes the table of docs/models.md (20 minutes)"
	@echo "make compat  tests of the engine on the oldest vLLM that is promised (450 MB once, then a quarter of an hour)"
	@echo "make gpu     on a machine with a GPU: what runs there, with tables (28 minutes; STAGE=... for one stage)"
	@echo "make large   what takes minutes: a server under ten minutes of load and 10,000 malformed requests, a million texts, kills"
	@echo "make lint    lint, type check and the order of packages only"
	@echo "make clean   remove $(VENV) and every cache folder of the tools"

setup:
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash requirements/setup.sh

demo: setup
	@$(BIN)/blendrag demo
	@echo; echo "The same from a LangChain chain (examples/langchain_chain.py):"; echo
	@$(BIN)/python examples/langchain_chain.py
	@echo; echo "and from a LlamaIndex query engine (examples/llamaindex_query_engine.py):"; echo
	@$(BIN)/python examples/llamaindex_query_engine.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

unit: setup
	$(BIN)/pytest -q -n auto -m "not engine and not slow and not models" tests/unit

$(KERNEL): requirements/kernel.lock
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target $@ -r $<
	@touch $@

# Apart from the other packages: torch and vLLM change what they do where they find Triton.
kernel: setup
	@$(MAKE) --no-print-directory $(KERNEL)
	TRITON_INTERPRET=1 PYTHONPATH="$(abspath $(KERNEL)):$$PYTHONPATH" $(BIN)/pytest -q \
		tests/unit/attention tests/unit/engine/test_paged_cache.py tests/unit/engine/test_gpu_backends.py \
		tests/gpu/test_tensors.py

# In the environment that is active, or PYTHON's: that of $(VENV) computes on the CPU.
STAGES = PYTHONPATH="$(CURDIR):$$PYTHONPATH" MODEL="$(MODEL)" OUT="$(OUT)" \
	$(or $(PYTHON),python3) tests/gpu/stages.py $(STAGE)

gpu:
	$(eval REFUSED := $(shell $(STAGES) --check))$(if $(REFUSED),$(error $(REFUSED)))
	@$(STAGES)

# Without xdist's reordering: a worker's engine for all of the run would start before those of other tests.
PARTED = $(BIN)/pytest -n auto --dist loadgroup --no-loadscope-reorder

engines: setup
	$(PARTED) -m "variant and not models"
	$(BIN)/pytest -m parallel

large: setup
	$(BIN)/pytest --large -m large

models: setup
	UPDATE_MODELS=1 $(BIN)/pytest tests/unit/engine/test_structures.py
	$(BIN)/pytest -m own_engine tests/engine/test_architectures.py tests/engine/test_weights.py

$(OLDEST): requirements/oldest.lock
	$(BIN)/python -m pip install -qq --no-deps --upgrade --target $@ -r $<
	@touch $@

# In front of the other packages, which are new enough for it. Of tests that start engines of their own, those of
# asynchronous claims. The functions by which three files lay out caches came later.
compat: setup
	@$(MAKE) --no-print-directory $(OLDEST)
	PYTHONPATH="$(abspath $(OLDEST)):$$PYTHONPATH" $(BIN)/pytest -q -m "not own_engine" tests/unit/engine tests/engine \
		$(addprefix --ignore tests/unit/engine/test_,paged_cache.py head_pages.py gpu_backends.py)

test: lint
	$(PARTED) -m "not models and not variant and not parallel and not (engine and gpu)"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find blendrag tests integrations -name __pycache__ -type d -prune -exec rm -rf {} +
