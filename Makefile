# `make quickstart` and `make test` do everything, from nothing. Both set up .venv first (`make install`).

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Another build of torch, for older drivers and GPUs: make TORCH_INDEX=URL. docs/runs.md says which.
TORCH_INDEX ?=
# From where the torch in .venv is. Another index replaces it; without one the build that is there stays.
INDEX_OF_TORCH := .venv/.torch_index
ifneq ($(TORCH_INDEX),)
ifneq ($(TORCH_INDEX),$(shell cat $(INDEX_OF_TORCH) 2>/dev/null))
.PHONY: other-torch
.venv/.installed: other-torch
FROM_INDEX := --force-reinstall --index-url $(TORCH_INDEX)
endif
endif

.PHONY: install install-extra install-dev install-eval install-triton quickstart gallery test test-deep house
.PHONY: test-gpu gpu-check gpu-profile gpu-papers cpu-check lint clean

install: .venv/.installed
install-extra: .venv/.installed-extra
install-dev: .venv/.installed-dev
install-eval: .venv/.installed-eval

# torch first: later commands keep the build that is there, since its version is the one of constraints.txt.
.venv/.installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; point PYTHON at one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "error: $(PYTHON) has no venv module; on Debian: apt install python3-venv"; exit 1; }
	$(PIP) $(FROM_INDEX) torch
	$(if $(FROM_INDEX),@echo '$(TORCH_INDEX)' > $(INDEX_OF_TORCH))
	$(PIP) -r requirements.txt
	@touch $@

# pillow, scikit-learn and scipy, for images and reproduce.py.
.venv/.installed-extra: requirements-extra.txt .venv/.installed
	$(PIP) -r requirements-extra.txt
	@touch $@

.venv/.installed-dev: requirements-dev.txt .venv/.installed-extra
	$(PIP) -r requirements-dev.txt
	@touch $@

# lm-evaluation-harness, for evaluate.py.
.venv/.installed-eval: requirements-eval.txt .venv/.installed
	$(PIP) -r requirements-eval.txt
	@touch $@

# For a deep test, which needs no GPU: Triton interprets its kernels. Only beside torch's build for CPUs, on Linux x86-64:
# builds for GPUs bring a Triton of their own, which this one would replace.
install-triton: install
	$(PIP) --no-deps triton==3.7.1

data/pystdlib/meta.json: | install
	$(BIN)/python data/pystdlib/prepare.py

# Ctrl-C saves; the same command continues from there.
quickstart: install data/pystdlib/meta.json
	$(BIN)/python train.py config/quickstart.py --init_from=auto
	$(BIN)/python sample.py --out_dir=out/quickstart --start="class " --num_samples=2 --max_new_tokens=400 --temperature=0.7
	@echo 'Trained and sampled. The loss curve is out/quickstart/loss.png. Activate the environment, then try:'
	@echo '  . .venv/bin/activate'
	@echo '  python sample.py --out_dir=out/quickstart --start="import os"             # your own prompt'
	@echo '  python train.py config/quickstart.py config/dnt/s1.py --out_dir=out/s1 # the same without DNT: Pre-LN'
	@echo '  python train.py config/quickstart.py --optimizer=msgdw --learning_rate=1.0 --out_dir=out/m # momentum SGD'
	@echo '  python analyze.py out/quickstart                                       # look inside: every figure that applies'
	@echo '  python train.py --help                                                 # every flag'

# Every figure of analyze.py, in out/gallery: docs/gallery.md shows them.
gallery: install data/pystdlib/meta.json
	$(BIN)/python train.py config/quickstart.py config/gallery.py config/dnt/s1.py --init_std=0.02 --init_from=auto --out_dir=out/gallery/s1
	$(BIN)/python train.py config/quickstart.py config/gallery.py --init_std=0.02 --init_from=auto --out_dir=out/gallery/s5
	$(BIN)/python train.py config/quickstart.py config/gallery.py config/dnt/s1.py config/dyt/dyt.py --n_expert=4 --init_std=0.07 \
	    --init_from=auto --out_dir=out/gallery/dyt
	$(BIN)/python analyze.py out/gallery/s1 out/gallery/s5 --out=out/gallery/figures
	$(BIN)/python analyze.py out/gallery/dyt --figures=alpha,experts --out=out/gallery/dyt/figures
	rm -rf exported/gallery
	$(BIN)/python export.py --out_dir=out/gallery/s1 --to=exported/gallery
	$(BIN)/python analyze.py --init_from=exported/gallery --dataset=README.md --figures=angular,removal --out=out/gallery/exported

# No reordering: tests/distributed/ comes first, because its runs take longest. A worker that dies is not replaced:
# the next one would make the same test.
test-deep: DEEP = --deep
test test-deep: install-dev
	@$(BIN)/python -m pytest -q $(DEEP) -n auto --maxprocesses=8 --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0

# What guards this repository and does not judge a fork: its shape, its pages, its configs beside the papers.
house: install-dev
	@$(BIN)/python -m pytest -q --house -n auto --maxprocesses=8 --dist=loadgroup

# What needs a CUDA GPU. Elsewhere each test is skipped.
test-gpu: install-dev
	@$(BIN)/python -m pytest -q -m gpu

# A GPU's arithmetic and speed, its time by kernel, tables of the papers; a CPU beside nanoGPT: docs/results/speed.md.
# With the Python of .venv, or where there is none with PYTHON, which needs torch.
gpu-check gpu-profile gpu-papers cpu-check:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m nanodnt.bench $@ out/$@

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv out
