# `make demo` and `make test` are all that a newcomer needs; `make help` lists the rest.
# The environment is made once, in .venv. To use one of your own: make VENV=/path/to/venv INSTALLED= demo

VENV ?= .venv
PYTHON ?= python3
GPU := $(shell command -v nvidia-smi 2>/dev/null)
# Without a GPU one plain torch release is enough; with one, take what pip finds best for it.
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
# One process, which takes the GPU that it finds. On Linux without one, two: 1.6 times as fast on two CPU cores.
ONE := accelerate launch --num_processes 1
TWO := ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --main_process_port 0
LAUNCH ?= $(if $(GPU)$(filter-out Linux,$(shell uname -s)),$(ONE),$(TWO))
INSTALLED ?= $(VENV)/.installed
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
export TOKENIZERS_PARALLELISM := false
# Models as small as these run faster on one thread than on several, which wait for each other while other programs run.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

DATA ?= data/sotu
RUN ?= runs/demo
DATA_ARGS ?=
TRAIN_ARGS ?=
EVAL_ARGS ?=
TEST_PROCESSES ?= 2
NEED_GPU = @python -c "import sys, torch; torch.cuda.is_available() or sys.exit('make $@ needs a CUDA device; torch sees none here')"

.DEFAULT_GOAL := help
.PHONY: help env demo demo-smoke recipes-smoke lint format test test-slow test-gpu bench bench-train bench-train-2gpu bench-train-gpus clean

help: ## what can be made
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

env: $(INSTALLED) ## the environment alone

$(VENV)/.installed: pyproject.toml
	@echo "installing torch and the rest into $(VENV), once: minutes, mostly of downloads"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	pip install --quiet $(TORCH)
	pip install --quiet --editable ".[eval,demo,dev]"
	touch $@

demo: $(INSTALLED) ## pretrain a small triadic model on real text, judge it, let it write (minutes on a laptop)
	python scripts/prepare_data.py --config configs/data/sotu.yaml output=$(DATA) $(DATA_ARGS)
	$(LAUNCH) --num_machines 1 --mixed_precision no --dynamo_backend no \
	    scripts/pretrain.py --config configs/train/demo.yaml \
	    data.train=$(DATA)/train data.validation=$(DATA)/validation run.output_dir=$(RUN) $(TRAIN_ARGS)
	scripts/eval.sh $(RUN) --suite demo --output $(RUN)/evaluation $(EVAL_ARGS)
	@echo "make demo: see $(RUN)/loss.png, $(RUN)/evaluation (results.md, figures) and the model, $(RUN)/final"

demo-smoke: ## the demo at its smallest: every step runs, nothing is learnt
	rm -rf runs/demo-smoke data/demo-smoke
	$(MAKE) demo DATA=data/demo-smoke RUN=runs/demo-smoke \
	    DATA_ARGS="source.files=[sotu/data/speeches/*199*.txt] source.validation.documents=4" \
	    TRAIN_ARGS="schedule.warmup_steps=1 run.steps=4 run.log_every=1 run.validate_every=2 run.validation_windows=2 run.save_every=2" \
	    EVAL_ARGS="perplexity.max_windows=2 ruler.lengths=[512] ruler.samples=1 sample.max_new_tokens=8 \
	        checks.min_gain_over_unigram=null checks.min_context_gain=null checks.min_word_share=null"

recipes-smoke: $(INSTALLED) ## every recipe at its smallest: a quarter of an hour on a CPU
	recipes/smoke.sh

lint: $(INSTALLED) ## style and import contracts
	ruff check .
	ruff format --check .
	lint-imports

format: $(INSTALLED) ## rewrite what ruff can mend
	ruff check --fix .
	ruff format .

test: lint ## lint, import contracts, every test that needs neither minutes nor a GPU, the demo at its smallest
	pytest -m "not slow and not gpu" --numprocesses $(TEST_PROCESSES) --dist loadfile
	$(MAKE) demo-smoke
	@echo "make test: everything passed"

test-slow: $(INSTALLED) ## the tests that take minutes
	pytest -m slow --timeout 3600

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	$(NEED_GPU)
	pytest -m gpu

bench: $(INSTALLED) ## op, layer and 1.3B block against a Transformer's and, where installed, fla's and FlashQLA's, on one GPU
	$(NEED_GPU)
	python kernels/benchmarks/bench.py --shapes 4x8192 4x32768 1x65536 \
	    --impl triadic fla flashqla sdpa_cudnn sdpa_flash --profile
	python scripts/benchmark_block.py --out recipes/figure4_efficiency/results/paper/block.json
	python recipes/collect.py recipes/figure4_efficiency --scale paper

bench-train: $(INSTALLED) ## training speed on one GPU: tokens/s, MFU, peak memory, 4k and 64k windows (minutes)
	$(NEED_GPU)
	scripts/bench_train.sh

bench-train-2gpu: $(INSTALLED) ## data and context parallelism on two GPUs against one
	$(NEED_GPU)
	scripts/bench_train_2gpu.sh

bench-train-gpus: $(INSTALLED) ## how training speed grows from one GPU to four, under DDP, ZeRO-1, ZeRO-2 and FSDP2
	$(NEED_GPU)
	scripts/bench_train_gpus.sh

clean: ## remove the environment, prepared data and runs
	rm -rf .venv data runs exports results
