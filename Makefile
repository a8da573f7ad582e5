# Two commands on a fresh clone do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
export CHROMIUM

# For the tests alone: flash-attn without its CUDA kernel, for its Python layer is what they watch, and litgpt,
# which pins versions that it does not need.
FLASH_ON_CPU := FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE

.PHONY: demo test test-slow soak lint setup chromium

setup: $(KERNELS)

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[test,dev]'
	touch $@

$(KERNELS): $(READY)
	$(FLASH_ON_CPU) $(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt \
		--no-build-isolation --no-deps flash-attn litgpt || echo "their tests will be skipped"
	touch $@

# The report's tests open a real browser; Debian's package serves when none is there.
chromium:
ifeq ($(CHROMIUM),)
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
endif

demo: $(READY)
	$(BIN)/stabilitykit fit --config recipes/zoo/bad-batch.yaml

test: $(KERNELS) chromium
	CHROMIUM="$${CHROMIUM:-$$(command -v chromium)}" $(BIN)/python -m pytest -m "not slow and not soak"

# The rest, and every soak at a twentieth of its size.
test-slow: $(KERNELS) chromium
	SOAK=1 CHROMIUM="$${CHROMIUM:-$$(command -v chromium)}" $(BIN)/python -m pytest -m "slow or soak"

soak: $(KERNELS)
	SOAK=20 $(BIN)/python -m pytest -m soak -s

lint: $(KERNELS)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright
